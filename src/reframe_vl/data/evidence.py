"""Evidence arithmetic (docs/method.md, 1.3): expansion, coverage, applicability; all pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from reframe_vl.types import Applicability, Box

EVIDENCE_VERSION = "1"
"""Names the rules by which evidence is expanded; records carry it. Change it with the rules."""

MIN_SIDE = 2.0
"""The shortest side, in pixels, that a call can ask for: ``PromptSettings.min_side`` by default."""

MAX_FRAMES = 8
"""The most frames that a call can ask for: ``PromptSettings.max_frames`` by default."""


def expand_box(box: Box, size: tuple[int, int], factor: float = 1.5) -> Box:
    """Scales a box's width and height about its centre, then clips it to the image.

    Raises:
        ValueError: The box is empty, or nothing of the expanded box lies in the image.
    """
    x0, y0, x1, y1 = box
    if not (all(map(math.isfinite, box)) and x0 < x1 and y0 < y1):
        raise ValueError(f"The box {box} is empty: give finite x0 < x1 and y0 < y1, x first.")
    width, height = size
    margin_x, margin_y = (x1 - x0) * (factor - 1) / 2, (y1 - y0) * (factor - 1) / 2
    expanded = (
        max(0.0, x0 - margin_x),
        max(0.0, y0 - margin_y),
        min(float(width), x1 + margin_x),
        min(float(height), y1 + margin_y),
    )
    if expanded[0] >= expanded[2] or expanded[1] >= expanded[3]:
        raise ValueError(
            f"The box {box} lies outside the image of {width}x{height} pixels: "
            "it is probably given in another scale."
        )
    return expanded


def box_coverage(boxes: Sequence[Box], size: tuple[int, int]) -> float:
    """The area of the boxes' union as a share of the image; exact, in [0, 1].

    Parts outside the image do not count.
    """
    width, height = size
    clipped = np.clip(np.asarray(boxes, np.float64).reshape(-1, 4), 0, [width, height] * 2)
    xs, ys = np.unique(clipped[:, 0::2]), np.unique(clipped[:, 1::2])
    # Between neighbouring coordinates nothing changes: each such cell is covered or it is not.
    covered = np.zeros((max(len(xs) - 1, 0), max(len(ys) - 1, 0)), bool)
    for x0, y0, x1, y1 in clipped:
        covered[
            np.searchsorted(xs, x0) : np.searchsorted(xs, x1),
            np.searchsorted(ys, y0) : np.searchsorted(ys, y1),
        ] = True
    area = math.fsum((np.diff(xs)[:, None] * np.diff(ys)[None, :])[covered])
    return min(1.0, area / (width * height))


def expand_segments(
    segments_s: Sequence[tuple[float, float]],
    timestamps_s: Sequence[float],
    end_s: float,
    margin_frames: int = 1,
) -> tuple[tuple[int, ...], ...]:
    """Turns windows in seconds into runs of frames on a video's grid, widened at both ends.

    A window has the frames whose time lies in [start, end); one that lies between two frames has
    the nearest. Each run is widened by ``margin_frames`` of the grid and clipped to it. Windows
    that overlap stay items of their own, in their order, and share frames.

    Args:
        segments_s: (start, end) of each window; the part after the video's end does not count.
        timestamps_s: When each frame of the grid is shown, ascending.
        end_s: When the video ends.

    Raises:
        ValueError: A window is empty, or nothing of it lies in the video.
    """
    runs = []
    for start, end in segments_s:
        if not (math.isfinite(start) and math.isfinite(end) and start < end):
            raise ValueError(
                f"The window {start:g}-{end:g} s is empty: give finite start < end in seconds."
            )
        if start >= end_s or end <= 0:
            raise ValueError(
                f"The window {start:g}-{end:g} s lies outside the video, which ends at "
                f"{end_s:g} s: it is probably of another video or in another unit. Correct it, "
                "or leave the row out."
            )
        first, stop = bisect_left(timestamps_s, start), bisect_left(timestamps_s, end)
        if first == stop:
            middle = (start + min(end, end_s)) / 2
            around = range(max(first - 1, 0), min(first + 1, len(timestamps_s)))
            first = min(around, key=lambda frame: abs(timestamps_s[frame] - middle))
            stop = first + 1
        widened = range(max(first - margin_frames, 0), stop + margin_frames)
        runs.append(tuple(widened[: len(timestamps_s) - widened.start]))
    return tuple(runs)


def segment_coverage(segments: Sequence[Sequence[int]], num_frames: int) -> float:
    """The frames of the segments' union as a share of the grid's.

    The grid is evenly spaced in time, so this is their share of the video's duration. It is of the
    whole segments, before they are subsampled.
    """
    return len({frame for segment in segments for frame in segment}) / num_frames


def subsample_frames(frames: Sequence[int], max_frames: int) -> tuple[int, ...]:
    """At most so many of a segment's frames, evenly spread, its ends among them.

    Of a segment that is cut down to one frame it is the middle one.
    """
    if len(frames) <= max_frames:
        return tuple(frames)
    if max_frames == 1:
        return (frames[len(frames) // 2],)
    steps = max_frames - 1
    return tuple(frames[round(k * (len(frames) - 1) / steps)] for k in range(max_frames))


def applicability(
    coverage: float, *, beneficial_below: float = 0.25, non_beneficial_from: float = 0.6
) -> Applicability:
    """Whether a tool call helps, by the share of the whole that the evidence takes up.

    Raises:
        ValueError: The coverage is no share, or the thresholds are out of order.
    """
    if not 0 <= coverage <= 1:
        raise ValueError(f"A coverage of {coverage} is not a share between 0 and 1.")
    if beneficial_below > non_beneficial_from:
        raise ValueError(
            f"beneficial_below ({beneficial_below}) must not exceed non_beneficial_from "
            f"({non_beneficial_from})."
        )
    if coverage < beneficial_below:
        return Applicability.BENEFICIAL
    if coverage >= non_beneficial_from:
        return Applicability.NON_BENEFICIAL
    return Applicability.NEUTRAL
