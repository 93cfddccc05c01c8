"""Averages of item scores, under many draws of the items at once.

A measure of a benchmark is written once, in :meth:`Scored.mean` and the like. Row 0 of the weights
counts every item once and gives the value; the other rows are draws of the bootstrap and give its
interval, whatever the measure is: a mean, a mean of means, or a share of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from reframe_vl.evaluation.intervals import Interval

Draws = npt.NDArray[np.float64]
"""One value a draw; NaN where a draw has no item to take it of."""

_MAX_WEIGHTS = 2**22
"""Weights held at once: it bounds the memory of a large benchmark."""


@dataclass(frozen=True)
class Scored:
    """Scored items.

    Attributes:
        terms: Numbers of each item by name; NaN where one does not apply.
        groups: Labels of each item by kind.
        weights_BN: How often each draw has each item.
    """

    terms: Mapping[str, Float[np.ndarray, "N"]]
    groups: Mapping[str, Sequence[tuple[str, ...]]]
    weights_BN: Float[np.ndarray, "B N"]

    def labels(self, kind: str) -> list[str]:
        """The labels of a kind, sorted."""
        return sorted({label for labels in self.groups.get(kind, ()) for label in labels})

    def mean(self, term: str, **where: str) -> Float[np.ndarray, "B"]:
        """The mean of a term over the items that have these labels."""
        values_N = self.terms[term]
        counted_N = np.isfinite(values_N)
        for kind, label in where.items():
            counted_N = counted_N & np.array([label in labels for labels in self.groups[kind]])
        counts_B = self.weights_BN @ counted_N.astype(float)
        sums_B = self.weights_BN @ np.where(counted_N, values_N, 0.0)
        return _divided(sums_B, counts_B)

    def macro(self, term: str, kind: str, **where: str) -> Float[np.ndarray, "B"]:
        """The mean over the labels of a kind of the term's mean under each; NaN without labels."""
        if not self.labels(kind):
            return np.full(len(self.weights_BN), np.nan)
        return mean_of([self.mean(term, **{kind: label}, **where) for label in self.labels(kind)])

    def per_group(self, kind: str, reduce: Callable[[Float[np.ndarray, "K"]], float]) -> Scored:
        """One item a label of a kind, its terms reduced; it weighs as the first of its items.

        For groups whose items are drawn together.
        """
        members: dict[str, list[int]] = {}
        for index, labels in enumerate(self.groups[kind]):
            for label in labels:
                members.setdefault(label, []).append(index)
        firsts = [indices[0] for indices in members.values()]
        return Scored(
            {
                name: np.array([reduce(values_N[i]) for i in members.values()], np.float64)
                for name, values_N in self.terms.items()
            },
            {name: [labels[i] for i in firsts] for name, labels in self.groups.items()},
            self.weights_BN[:, firsts],
        )


def mean_of(parts: Sequence[Float[np.ndarray, "B"]]) -> Float[np.ndarray, "B"]:
    """The mean of values, draw by draw, without those that a draw does not have."""
    values_KB = np.stack(parts)
    has_KB = np.isfinite(values_KB)
    return _divided(np.where(has_KB, values_KB, 0.0).sum(0), has_KB.sum(0).astype(float))


def _divided(sums_B: Draws, counts_B: Draws) -> Draws:
    quotients_B = np.full(len(sums_B), np.nan)
    np.divide(sums_B, counts_B, out=quotients_B, where=counts_B > 0)
    return quotients_B


Measures = Callable[[Scored], Mapping[str, Draws]]


def drawn(
    terms: Mapping[str, Float[np.ndarray, "N"]],
    groups: Mapping[str, Sequence[tuple[str, ...]]],
    clusters: Sequence[Hashable],
    measures: Measures,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Draws]:
    """Each measure on all items, followed by its draws. Equal clusters give equal draws.

    Args:
        clusters: Items of one cluster are drawn together.
    """
    known: dict[Hashable, int] = {}
    cluster_of_N = np.array([known.setdefault(c, len(known)) for c in clusters], np.int64)
    rng = np.random.default_rng(seed)
    parts = [measures(Scored(terms, groups, np.ones((1, len(cluster_of_N)))))]
    for rows in np.array_split(
        np.arange(resamples), -(-resamples * max(len(cluster_of_N), 1) // _MAX_WEIGHTS)
    ):
        draws = rng.integers(len(known), size=(len(rows), len(known)))
        flat = draws + len(known) * np.arange(len(rows))[:, None]
        times_BC = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape).astype(float)
        parts.append(measures(Scored(terms, groups, times_BC[:, cluster_of_N])))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def interval_of(draws: Draws, level: float = 0.95) -> Interval | None:
    """The value and the percentiles of its draws; None where there is no value."""
    if not len(draws) or not np.isfinite(draws[0]):
        return None
    found = draws[1:][np.isfinite(draws[1:])]
    if not len(found):
        return Interval(float(draws[0]), float(draws[0]), float(draws[0]))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(draws[0]), float(low), float(high))
