"""Checks of records that a schema cannot make: do the annotation and the media belong together?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.records import Record
from reframe_vl.data.report import Problem
from reframe_vl.data.video_decoder import shared_decoder
from reframe_vl.types import Box, Modality


def validate_record(record: Record, root: Path | None = None) -> list[Problem]:
    """Checks what the schema cannot: that the annotation fits and the media are those described.

    Each problem makes the record unusable; its message names the field.

    Args:
        root: The folder of the record file; None leaves out the checks that open the media.
    """
    found = list(annotation_problems(record))
    odd = None if root is None else MediaCheck(root).problem(record)
    return [Problem(record.id, *reason) for reason in (*found, *([odd] if odd else []))]


def annotation_problems(record: Record) -> Iterator[tuple[str, str]]:
    """What is wrong with boxes and segments by what the record says of its media."""
    if record.media.size is not None:
        yield from box_problems(record, record.media.size)
    for number, segment in enumerate(record.segments):
        odd = segment_problem(segment, record.media.duration_s)
        if odd is not None:
            yield odd[0], f"segments.{number}: {odd[1]}"


def box_problems(record: Record, size: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """What is wrong with boxes, as annotated and as expanded, in an upright image of this size."""
    boxes = [(f"boxes.{number}.xyxy", box.xyxy) for number, box in enumerate(record.boxes)]
    if record.evidence is not None:
        expanded = enumerate(record.evidence.boxes)
        boxes += [(f"evidence.boxes.{number}", box) for number, box in expanded]
    for name, box in boxes:
        odd = box_problem(box, size)
        if odd is not None:
            yield odd[0], f"{name}: {odd[1]}"


class MediaCheck:
    """Are the media those that records describe? Each file is opened once.

    Args:
        root: The folder of the record file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sizes: dict[tuple[str, Modality], tuple[int, int] | MediaError] = {}

    def problem(self, record: Record) -> tuple[str, str] | None:
        """What is wrong, as (reason, message): of an image the header is read, of a video a frame.

        What a record says of a video is not asked.
        """
        name = (record.media.path, record.modality)
        if name not in self._sizes:
            self._sizes[name] = self._size(*name)
        size, stated = self._sizes[name], record.media.size
        if isinstance(size, MediaError):
            missing = isinstance(size.__cause__, FileNotFoundError)
            return "media_missing" if missing else "media_unreadable", f"media.path: {size}"
        if stated is not None and size != stated:
            reason, message = size_problem(stated, size)
            return reason, f"media.width, height: {message}"
        # With a stated size they were looked at when the record was read.
        return None if stated is not None else next(box_problems(record, size), None)

    def _size(self, name: str, modality: Modality) -> tuple[int, int] | MediaError:
        path = self._root / name
        try:
            if modality is Modality.IMAGE:
                return ImageFile(path).size
            return shared_decoder().size(path)
        except MediaError as error:
            return error


def segment_problem(
    segment: tuple[float, float], duration_s: float | None
) -> tuple[str, str] | None:
    """Says why a window does not belong to a video so long: (reason, message), or None."""
    if duration_s is None or segment[0] < duration_s:
        return None
    return (
        "segment_outside",
        f"the window {list(segment)} begins after the video, which is {duration_s:g} s long: it is "
        "perhaps in another unit, or of another video. Correct it, or leave the row out.",
    )


def box_problem(box: Box, size: tuple[int, int]) -> tuple[str, str] | None:
    """Says why a box does not belong to an image of this size: (reason, message), or None."""
    width, height = size
    x0, y0, x1, y1 = box
    named = f"the box {list(box)} does not fit the upright image of {width}x{height} pixels"
    if max(box) <= 1 and min(box) >= 0 and min(size) > 1:
        return (
            "wrong_scale",
            f"{named}: it looks normalised to 0-1. Multiply it by the image's width and height.",
        )
    if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
        return (
            "wrong_scale",
            f"{named}: it lies wholly outside, {_likely_frame(box)}. Convert it to the image's "
            "pixels, or leave the row out.",
        )
    if x0 < 0 or y0 < 0 or x1 > width or y1 > height:
        excess = max(-x0, -y0, x1 - width, y1 - height)
        return (
            "box_leaves_image",
            f"{named}: it leaves it by {excess:g} pixels, {_likely_frame(box)}. Convert it to the "
            "image's pixels, clip it if it is only careless, or leave the row out.",
        )
    return None


def size_problem(stated: tuple[int, int], real: tuple[int, int]) -> tuple[str, str]:
    """Says what is wrong with a stated size that is not the upright file's: (reason, message)."""
    how = "in another scale"
    if stated == real[::-1]:
        how = "on the media before their rotation (EXIF, display matrix)"
    elif not math.isclose(stated[0] / stated[1], real[0] / real[1], rel_tol=0.02):
        how = "on a cropped, padded or different image"
    return (
        "size_mismatch",
        f"the row says {stated[0]}x{stated[1]} pixels, the upright file has {real[0]}x{real[1]}: "
        f"its boxes were probably drawn {how}. Convert them and the size, or leave the row out.",
    )


def _likely_frame(box: Box) -> str:
    if min(box) >= 0 and max(box) <= 1000:
        return "so it is perhaps on a 0-1000 grid or in another image size"
    return "so it is perhaps in another image size"
