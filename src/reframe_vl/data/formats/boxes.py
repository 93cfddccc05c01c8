"""Encodings of boxes, and how boxes are fitted to their image."""

from __future__ import annotations

from collections.abc import Sequence

from reframe_vl.data.formats.rows import Refused, changed
from reframe_vl.data.record_parts import AuditEntry
from reframe_vl.data.records import Record
from reframe_vl.data.validation import box_problem
from reframe_vl.types import Box

_CARELESS_PIXELS = 1
"""Rounding and inclusive edges explain one pixel outside the image; more is another frame."""

_NOISE_PIXELS = 1e-6
"""So far a sum of floats may be beside the number that was meant."""


def from_corner_and_size(x: float, y: float, width: float, height: float) -> Box:
    """COCO's [x, y, width, height]."""
    return (x, y, x + width, y + height)


def from_inclusive(xmin: float, ymin: float, xmax: float, ymax: float) -> Box:
    """Pascal VOC's corners: pixels are counted from 1, and the last one belongs to the box."""
    return (xmin - 1, ymin - 1, xmax, ymax)


def from_padded_square(box: Sequence[float], size: tuple[int, int]) -> Box:
    """Shares of the square that the image is the middle of.

    The padding before the image is half of the whole, rounded down.
    """
    side = max(size)
    left, top = padding(size)
    x0, y0, x1, y1 = box
    return (x0 * side - left, y0 * side - top, x1 * side - left, y1 * side - top)


def padding(size: tuple[int, int]) -> tuple[int, int]:
    """What stands left of and above an image that was padded to a square."""
    side = max(size)
    return ((side - size[0]) // 2, (side - size[1]) // 2)


def fit_boxes(record: Record) -> Record:
    """Clips boxes that leave the image by a pixel at most; without a size it changes nothing.

    Raises:
        Refused: A box is in another scale, or leaves the image by more.
    """
    size = record.media.size
    if size is None or not record.boxes:
        return record
    fitted, notes = [], []
    for box in record.boxes:
        xyxy, entries = _fitted(box.xyxy, size)
        fitted.append(box if xyxy == box.xyxy else box.model_copy(update={"xyxy": xyxy}))
        notes += entries
    return record.model_copy(
        update={"boxes": tuple(fitted), "audit": (*record.audit, *notes)},
    )


def _fitted(box: Box, size: tuple[int, int]) -> tuple[Box, list[AuditEntry]]:
    width, height = size
    x0, y0, x1, y1 = box
    clipped = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
    excess = max(abs(a - b) for a, b in zip(box, clipped, strict=True))
    odd = box_problem(clipped if excess <= _CARELESS_PIXELS else box, size)
    if odd is not None:
        raise Refused(*odd)
    if excess <= _NOISE_PIXELS:
        return clipped, []
    return clipped, [changed("box_clipped", f"the box {list(box)} was clipped to the image")]
