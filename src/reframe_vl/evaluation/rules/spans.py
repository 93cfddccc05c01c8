"""Windows of time: which a policy looked at, and how they meet those that hold the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Span = tuple[float, float]
"""Start and end in seconds."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, ascending; spans that touch become one.

    >>> merged([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def spans_of_frames(frames: Iterable[int], times_s: Sequence[float]) -> list[Span]:
    """The time that frames of a grid stand for: each up to halfway to its neighbours.

    The first frame's half before it, and the last one's after it, are as long as their other half.

    >>> spans_of_frames([0, 1, 3], [1.0, 3.0, 5.0, 7.0])
    [(0.0, 4.0), (6.0, 8.0)]
    """
    if len(times_s) < 2:
        return [(times_s[0], times_s[0] + 1.0) for _ in frames][:1]
    middles = [(a + b) / 2 for a, b in pairwise(times_s)]
    edges = [2 * times_s[0] - middles[0], *middles, 2 * times_s[-1] - middles[-1]]
    return merged((max(edges[frame], 0.0), edges[frame + 1]) for frame in frames)


def intervals_iou(given: Iterable[Span], truth: Iterable[Span]) -> float:
    """The IoU of two sets of windows, each with overlaps merged; 0 where both are empty."""
    ours, theirs = merged(given), merged(truth)
    shared = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ours for b in theirs)
    union = sum(end - start for start, end in [*ours, *theirs]) - shared
    return shared / union if union > 0 else 0.0


def best_iou_and_iop(given: Span | None, windows: Iterable[Span]) -> tuple[float, float]:
    """The best IoU and the best IoP of one span with any of some windows, each by itself.

    IoP is the overlap as a share of the given span. A span without length has IoP 1 inside a
    window. No span has neither.
    """
    best_iou = best_iop = 0.0
    if given is None:
        return best_iou, best_iop
    start, end = given
    for low, high in windows:
        if start == end:
            best_iop = max(best_iop, float(low <= start <= high))
            continue
        shared = min(end, high) - max(start, low)
        whole = max(end, high) - min(start, low)
        best_iou = max(best_iou, shared / whole if whole > 0 else 0.0)
        best_iop = max(best_iop, shared / (end - start) if end > start else 0.0)
    return best_iou, best_iop
