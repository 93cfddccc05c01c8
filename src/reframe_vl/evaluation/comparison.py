"""Item by item arithmetic on measures: paired differences, contrasts, areas under curves.

A measure is the mean of its items' terms. So a difference of measures on the same items is the mean
of the differences of terms, and :func:`reframe_vl.evaluation.report.interval` gives its interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from reframe_vl.evaluation.report import Terms


def combine(parts: Sequence[tuple[float, Terms]]) -> Terms:
    """A weighted sum of terms, on the items that all parts hold.

    ``[(1, a), (-1, b)]`` is the paired difference of two runs.

    Raises:
        ValueError: There are no parts.
    """
    if not parts:
        raise ValueError("Nothing to combine: give at least one weight with its terms.")
    _, first = parts[0]
    shared = [item for item in first if all(item in terms for _, terms in parts)]
    return {item: sum(weight * terms[item] for weight, terms in parts) for item in shared}


def area(curve: Mapping[int, Terms]) -> Terms:
    """The mean under a learning curve, by the trapezoid rule, of each item that all points hold.

    Divided by the steps it spans, so that a curve that stands still has its own value as area.

    Args:
        curve: Terms by step.

    Raises:
        ValueError: There are fewer than two points.
    """
    steps = sorted(curve)
    if len(steps) < 2:
        raise ValueError(f"A curve of {len(steps)} points has no area: evaluate it at two or more.")
    weights = dict.fromkeys(steps, 0.0)
    for left, right in pairwise(steps):
        for step in (left, right):
            weights[step] += (right - left) / 2 / (steps[-1] - steps[0])
    return combine([(weights[step], curve[step]) for step in steps])
