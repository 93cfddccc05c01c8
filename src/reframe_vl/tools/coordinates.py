"""The one place where a model's coordinate frame and original pixels are converted.

A box is ``(x0, y0, x1, y1)`` in every frame: x first, half-open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from reframe_vl.types import Box

UNIT_STEPS = 10_000
"""Steps of the 0-1 frame: boxes are written with four decimals."""


class CoordinateFrame(StrEnum):
    """What the numbers of a model's boxes mean."""

    GRID_1000 = "grid_1000"
    """Whole numbers: thousandths of the image's width and height."""
    UNIT = "unit"
    """Fractions of the image's width and height."""
    PIXEL_FED = "pixel_fed"
    """Whole pixels of the image as it was fed to the model, after resizing."""

    @property
    def integral(self) -> bool:
        """Whether the numbers are whole."""
        return self is not CoordinateFrame.UNIT

    def extent(self, fed_size: tuple[int, int]) -> tuple[int, int]:
        """The numbers that stand for the right and the bottom edge of the image."""
        match self:
            case CoordinateFrame.GRID_1000:
                return (1000, 1000)
            case CoordinateFrame.UNIT:
                return (1, 1)
            case CoordinateFrame.PIXEL_FED:
                return fed_size


def to_pixels(
    box: Sequence[float], frame: CoordinateFrame, size: tuple[int, int], fed_size: tuple[int, int]
) -> Box:
    """Converts a model's box to pixels of the original upright image; nothing is clipped.

    Args:
        box: As the model wrote it.
        frame: What its numbers mean.
        size: (width, height) of the original upright image.
        fed_size: (width, height) of the image as the model saw it.
    """
    (width, height), (right, bottom) = size, frame.extent(fed_size)
    x0, y0, x1, y1 = box
    return (x0 * width / right, y0 * height / bottom, x1 * width / right, y1 * height / bottom)


def from_pixels(
    box: Box, frame: CoordinateFrame, size: tuple[int, int], fed_size: tuple[int, int]
) -> list[int | float]:
    """Converts a box in original pixels to the numbers a model writes for it.

    Each edge goes to the nearest step of the frame, so it moves by at most half a step: a box whose
    sides are 40 steps or longer keeps an IoU of at least 0.95 on the way there and back. A shorter
    box keeps at least one step a side, and less IoU.
    """
    steps = 1 if frame.integral else UNIT_STEPS
    (width, height), (right, bottom) = size, frame.extent(fed_size)
    x0, x1 = _nearest_steps(box[0] / width, box[2] / width, right * steps)
    y0, y1 = _nearest_steps(box[1] / height, box[3] / height, bottom * steps)
    return [x0, y0, x1, y1] if frame.integral else [v / steps for v in (x0, y0, x1, y1)]


def _nearest_steps(low: float, high: float, steps: int) -> tuple[int, int]:
    """Rounds a range of fractions of an axis to its steps, inside the axis and never empty."""
    start, stop = (min(max(math.floor(v * steps + 0.5), 0), steps) for v in (low, high))
    if stop > start:
        return start, stop
    start = min(max(math.floor(low * steps), 0), steps - 1)
    return start, start + 1
