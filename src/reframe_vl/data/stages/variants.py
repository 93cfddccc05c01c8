"""Other readings of an annotation: what it would mean in another frame or unit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reframe_vl.data.records import Record
from reframe_vl.rewards.grounding import pairwise_iou
from reframe_vl.types import Box, Modality

_SAME_IOU = 0.9
"""Readings that overlap so far are one."""


def box_readings(
    record: Record, scales: Sequence[float], sides: Sequence[int]
) -> dict[str, tuple[Box, ...]]:
    """Boxes of an image, converted from other frames that all of them fit in; by name.

    Args:
        scales: The image may have been resized by each of these before boxes were drawn.
        sides: Or so that its longer side had so many pixels, or to a square of so many.
    """
    size = record.media.size
    boxes = [box.xyxy for box in record.boxes]
    if record.modality is not Modality.IMAGE or size is None or not boxes:
        return {}
    width, height = size
    frames: dict[str, tuple[float, float]] = {
        f"resized by {scale:g}": (width * scale, height * scale) for scale in scales
    }
    for side in sides:
        longer = side / max(size)
        frames[f"longer side {side}"] = (width * longer, height * longer)
        frames[f"{side}x{side}"] = (float(side), float(side))
    readings = {
        name: tuple(_scaled(box, width / across, height / down) for box in boxes)
        for name, (across, down) in frames.items()
    }
    readings["y before x"] = tuple((y0, x0, y1, x1) for x0, y0, x1, y1 in boxes)
    readings["corner and size"] = tuple((x, y, x + w, y + h) for x, y, w, h in boxes)
    distinct: dict[str, tuple[Box, ...]] = {}
    for name, reading in readings.items():
        known = [tuple(boxes), *distinct.values()]
        if not all(_fits(box, size) for box in reading):
            continue
        clipped = tuple((x0, y0, min(x1, width), min(y1, height)) for x0, y0, x1, y1 in reading)
        if not any(_same(clipped, other) for other in known):
            distinct[name] = clipped
    return distinct


def segment_readings(record: Record) -> dict[str, tuple[tuple[float, float], ...]]:
    """Segments of a video, converted from other units that all of them fit in; by name."""
    end_s, fps, times_s = record.media.duration_s, record.media.fps, record.media.timestamps_s
    if record.modality is not Modality.VIDEO or end_s is None or len(times_s) < 2:
        return {}
    step_s = times_s[1] - times_s[0]
    units = {"milliseconds": 1e-3, "minutes": 60.0, "frames of the grid": step_s}
    if fps is not None:
        units["frames"] = 1 / fps
    readings = {}
    for name, unit in units.items():
        reading = tuple((start * unit, end * unit) for start, end in record.segments)
        # Whoever names a moment does not mean less than the grid can tell.
        plausible = all(
            start < end_s and end <= end_s + step_s and end - start >= step_s / 2
            for start, end in reading
        )
        if plausible and abs(unit - 1) > 0.01:
            readings[name] = reading
    return readings if record.segments else {}


def _scaled(box: Box, x: float, y: float) -> Box:
    return (box[0] * x, box[1] * y, box[2] * x, box[3] * y)


def _fits(box: Box, size: tuple[int, int]) -> bool:
    """Whether a box lies in the image but for a pixel of rounding, and has a pixel in it."""
    (x0, y0, x1, y1), (width, height) = box, size
    return (
        x0 >= 0 and y0 >= 0 and x1 <= width + 1 and y1 <= height + 1
        and min(x1, width) - x0 >= 1 and min(y1, height) - y0 >= 1
    )  # fmt: skip


def _same(boxes: Sequence[Box], others: Sequence[Box]) -> bool:
    overlaps = pairwise_iou(np.array(boxes, np.float64), np.array(others, np.float64))
    return bool((overlaps.diagonal() >= _SAME_IOU).all())
