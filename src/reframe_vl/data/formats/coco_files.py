"""Files of COCO's detection format: images, annotations and categories in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit

from pydantic import model_validator

from reframe_vl.data.formats.boxes import from_corner_and_size
from reframe_vl.data.formats.json_files import members
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.regions import Count, count_question
from reframe_vl.data.formats.rows import Number, Refused, Row, RowFields, Text
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import MediaInfo
from reframe_vl.data.report import Problem

ENCODING = "bbox: [x, y, width, height], absolute pixels of the stored image"

Id = int | float | str


class _Image(RowFields):
    file_name: str
    width: PositiveWhole | None = None
    height: PositiveWhole | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_by_address(cls, value: Any) -> Any:
        """Some files, such as those of LVIS, name an image by its address alone."""
        if not isinstance(value, dict) or value.get("file_name") is not None:
            return value
        address = value.get("coco_url")
        if not isinstance(address, str):
            return value
        return value | {"file_name": PurePosixPath(unquote(urlsplit(address).path)).name}


class _Category(RowFields):
    name: Text


class _Annotation(RowFields):
    bbox: tuple[Number, Number, Number, Number]
    iscrowd: bool | None = None


class _Group(RowFields):
    image: _Image
    category: _Category
    annotations: list[_Annotation]


@dataclass(frozen=True)
class CocoFile:
    """What a file holds, entries without an id left out.

    Attributes:
        annotations: (place in the file, annotation), in its order.
        problems: The entries that cannot be used.
    """

    images: dict[Id, dict[str, Any]]
    categories: dict[Id, dict[str, Any]]
    annotations: list[tuple[str, dict[str, Any]]]
    problems: list[Problem]


def read_coco(path: Path) -> CocoFile:
    """Reads a whole file: its annotations may stand before the images they belong to."""
    problems: list[Problem] = []
    parts: dict[str, list[Any]] = {}
    for member in members(path):
        if isinstance(member, Problem):
            problems.append(member)
        elif member.key in ("images", "annotations", "categories"):
            if member.key in parts or not isinstance(member.value, list):
                message = f"{member.key!r} is no list, or stands there twice. Mend the file."
                problems.append(Problem(f"{path}, {member.key}", "bad_row", message))
            else:
                parts[member.key] = member.value
    missing = sorted({"images", "annotations", "categories"} - parts.keys())
    if missing:
        message = f"it has no {', '.join(missing)}: give a file of COCO's detection format."
        problems.append(Problem(str(path), "bad_row", message))
    annotations = []
    for number, entry in enumerate(parts.get("annotations", []), 1):
        place = f"annotation {number}"
        if isinstance(entry, dict):
            annotations.append((place, entry))
        else:
            problems.append(Problem(f"{path}, {place}", "bad_row", "it is no object. Mend it."))
    return CocoFile(
        images=_by_id(path, "image", parts.get("images", []), problems),
        categories=_by_id(path, "category", parts.get("categories", []), problems),
        annotations=annotations,
        problems=problems,
    )


def is_id(value: Any) -> TypeGuard[Id]:
    """Whether a value can name an entry."""
    if isinstance(value, float):  # As tables write them where some are missing.
        return value.is_integer()
    # True is not 1.
    return isinstance(value, int | str) and not isinstance(value, bool)


def _by_id(
    path: Path, what: str, entries: list[Any], problems: list[Problem]
) -> dict[Id, dict[str, Any]]:
    found: dict[Id, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}, {what} {number}"
        if not isinstance(entry, dict) or not is_id(entry.get("id")):
            problems.append(Problem(where, "bad_row", "it has no id. Mend it."))
        elif entry["id"] in found:
            message = f"an earlier one has the id {entry['id']!r} too. Remove one."
            problems.append(Problem(where, "repeated_id", message))
        else:
            found[entry["id"]] = entry
    return found


def coco_rows(
    path: Path, leave_out: Callable[[dict[str, Any], dict[str, Any]], tuple[str, str] | None]
) -> Iterator[Row | Problem]:
    """One row for each kind of object in each image; images without objects are problems.

    Args:
        leave_out: Says of (annotation, category) why it does not count: (reason, message), or None.
    """
    file = read_coco(path)
    yield from file.problems
    groups: dict[Id, dict[Id, list[dict[str, Any]]]] = {name: {} for name in file.images}
    seen: dict[Id, dict[str, Any]] = {}
    for place, annotation in file.annotations:
        where = f"{path}, {place}"
        image, category = annotation.get("image_id"), annotation.get("category_id")
        if not (is_id(image) and image in file.images):
            yield Problem(where, "unknown_id", f"the file has no image {image!r}. Correct it.")
            continue
        if not (is_id(category) and category in file.categories):
            message = f"the file has no category {category!r}. Correct it."
            yield Problem(where, "unknown_id", message)
            continue
        odd = leave_out(annotation, file.categories[category])
        if odd is not None:
            yield Problem(where, *odd)
            continue
        name = annotation.get("id")
        if is_id(name) and name in seen:
            if seen[name] == annotation:
                message = "an earlier annotation says the same. Remove one."
                yield Problem(where, "duplicate_row", message)
                continue
            message = f"an earlier, different annotation has the id {name!r} too."
            yield Problem(where, "repeated_id", message, kept=True)
        if is_id(name):
            seen[name] = annotation
        groups[image].setdefault(category, []).append(annotation)
    for image, kinds in groups.items():
        if not kinds:
            yield Problem(f"{path}, image {image!r}", "no_object", "no object of it counts.")
        for category, objects in kinds.items():
            raw = {
                "image": file.images[image],
                "category": file.categories[category],
                "annotations": objects,
            }
            yield Row(path, f"image {image!r}, category {category!r}", raw)


def counted(row: Row) -> tuple[MediaInfo, Count]:
    """The image of a row, and the question how many objects of the kind it has.

    Raises:
        Refused: A region of many objects is among them, so that they cannot be counted.
        ValidationError: A field is missing or of the wrong type.
    """
    group = _Group.model_validate(row.raw)
    if any(annotation.iscrowd for annotation in group.annotations):
        raise Refused(
            "crowd",
            f"a region of many objects (iscrowd) is among those of {group.category.name!r}: they "
            "cannot be counted. Leave the row out.",
        )
    image = group.image
    media = MediaInfo(path=media_name(image.file_name), width=image.width, height=image.height)
    boxes = [from_corner_and_size(*annotation.bbox) for annotation in group.annotations]
    return media, count_question(group.category.name, boxes)
