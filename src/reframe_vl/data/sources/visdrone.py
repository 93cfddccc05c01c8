"""VisDrone detection: one question for each kind of object in an image, how many there are.

Two forms are read. The published one has a text file an image, whose lines are ``left, top, width,
height, score, class, truncation, occlusion``; it does not state sizes. The other is COCO's format.
What an evaluation ignores is left out: ignored regions, class "others", and score 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reframe_vl.data.formats.boxes import from_corner_and_size
from reframe_vl.data.formats.coco_files import ENCODING, coco_rows, counted
from reframe_vl.data.formats.regions import count_question
from reframe_vl.data.formats.rows import Number, Row, split_of
from reframe_vl.data.records import MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.data.text_files import iter_json_lines
from reframe_vl.types import Modality

_CLASSES = (
    "ignored region",
    "pedestrian",
    "people",
    "bicycle",
    "car",
    "van",
    "truck",
    "tricycle",
    "awning-tricycle",
    "bus",
    "motor",
    "others",
)
_IGNORED = frozenset(("ignored region", "ignored regions", "ignored-regions", "others"))
_FIELDS = 8
_Box = TypeAdapter(tuple[Number, Number, Number, Number])


class VisDrone(Source):
    """Both forms; of the published one, give the folder of the text files."""

    licence = "VisDrone: for research only (unverified)."
    encoding = ENCODING
    suffixes = (".txt", ".json")
    text_encoding = (
        "left,top,width,height,score,class,truncation,occlusion: absolute pixels of the stored "
        "image; class 0 and 11, and score 0, are ignored"
    )

    def rows(self) -> Iterator[Row | Problem]:
        """One row for each kind of object in each image."""
        for path in self.files():
            if path.suffix.lower() == ".txt":
                yield from _text_rows(path)
            else:
                yield from coco_rows(path, _ignored)

    def native(self, record: Record) -> Any:
        """Lines of the text file, or annotations with their image and category."""
        return record.raw.get("lines", record.raw)

    def record(self, row: Row) -> Record:
        """One record a row."""
        if "lines" in row.raw:
            parts = [line.split(",") for line in row.raw["lines"]]
            boxes = [from_corner_and_size(*_Box.validate_python(part[:4])) for part in parts]
            media, encoding = MediaInfo(path=f"{row.path.stem}.jpg"), self.text_encoding
            count = count_question(row.raw["class"], boxes)
        else:
            media, count = counted(row)
            encoding = self.encoding
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=media,
            split=split_of(row.path),
            question=count.question,
            answer=count.answer,
            boxes=count.boxes,
            notes=count.notes,
            encoding=encoding,
        )


def _text_rows(path: Path) -> Iterator[Row | Problem]:
    groups: dict[str, list[str]] = {}
    for number, line in iter_json_lines(path):
        where = f"{path}, line {number}"
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield Problem(where, "bad_text", f"{error}. Mend or remove the line.")
            continue
        # Lines of the published files may end in a comma.
        parts = text.strip().removesuffix(",").split(",")
        if len(parts) != _FIELDS or parts[5].strip() not in map(str, range(len(_CLASSES))):
            message = f"{text[:80]!r} has not {_FIELDS} numbers with a class of 0 to 11. Mend it."
            yield Problem(where, "bad_row", message)
            continue
        kind = _CLASSES[int(parts[5])]
        if kind in _IGNORED or parts[4].strip() == "0":
            yield Problem(where, "ignored", f"it is ignored ({kind}, score {parts[4].strip()}).")
            continue
        groups.setdefault(kind, []).append(text)
    if not groups:
        yield Problem(str(path), "no_object", "no object of it counts.")
    for kind, lines in groups.items():
        yield Row(path, f"class {kind!r}", {"file": path.name, "class": kind, "lines": lines})


def _ignored(annotation: dict[str, Any], category: dict[str, Any]) -> tuple[str, str] | None:
    name = str(category.get("name")).strip().lower()
    if name in _IGNORED or annotation.get("ignore") == 1 or annotation.get("score") == 0:
        return ("ignored", f"it is ignored ({name}).")
    return None
