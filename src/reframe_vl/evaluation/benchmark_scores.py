"""Scores of responses: one row of terms an item, as a torchmetrics metric and with intervals."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric

from reframe_vl.evaluation.answers import Answered
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, JudgeError
from reframe_vl.evaluation.rules.scores import Draws, Scored, drawn

logger = logging.getLogger(__name__)

Terms = dict[str, float]
JUDGE_FAILED = "judge_failed"
"""Why an item has no score although it was answered."""

_JUDGED_AT_ONCE = 16


def score_answers(
    benchmark: Benchmark,
    items: Sequence[Item],
    answers: Mapping[str, Answered],
    judge: Judge | None = None,
) -> tuple[dict[str, Terms], dict[str, int]]:
    """The terms of each item that can be scored, and how many cannot, by reason."""
    left_out: dict[str, int] = {}
    played = []
    for item in items:
        found = answers.get(item.sample.id)
        if found is not None and found.left_out is None:
            played.append(item)
        elif found is not None and found.left_out is not None:
            left_out[found.left_out] = left_out.get(found.left_out, 0) + 1

    def score(item: Item) -> Terms | None:
        try:
            return benchmark.score(item, answers[item.sample.id].response, judge)
        except JudgeError as error:
            logger.warning("%s has no score: %s", item.sample.id, error)
            return None

    with ThreadPoolExecutor(_JUDGED_AT_ONCE if judge is not None else 1) as threads:
        terms = list(threads.map(score, played))
    scores = {i.sample.id: t for i, t in zip(played, terms, strict=True) if t is not None}
    if failed := len(played) - len(scores):
        left_out[JUDGE_FAILED] = failed
    return scores, left_out


def draws_of(
    benchmark: Benchmark, items: Sequence[Item], scores: Mapping[str, Terms]
) -> dict[str, Draws]:
    """Each measure of a benchmark on the items that have scores, followed by bootstrap draws.

    Two sets of scores of the same items see the same draws: their difference is a paired one.
    """
    scored = [item for item in items if item.sample.id in scores]
    if not scored:
        return {}
    terms, groups = _columns(scored, [scores[item.sample.id] for item in scored])
    return drawn(terms, groups, [item.cluster for item in scored], benchmark.measures)


def _columns(
    items: Sequence[Item], rows: Sequence[Terms]
) -> tuple[dict[str, Float[np.ndarray, "N"]], dict[str, list[tuple[str, ...]]]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    terms = {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}
    kinds = list(dict.fromkeys(kind for item in items for kind in item.groups))
    return terms, {kind: [item.groups.get(kind, ()) for item in items] for kind in kinds}


class BenchmarkMetric(Metric):
    """A benchmark's measures over batches and processes, as for validation while training.

    An item that comes twice, as samplers pad the last batch, counts once: its terms are averaged.

    Args:
        benchmark: Whose measures.
        items: All of its items; batches name them by their place in this list.
    """

    full_state_update: ClassVar[bool] = False  # type: ignore[misc]
    is_differentiable: ClassVar[bool] = False  # type: ignore[misc]
    higher_is_better: ClassVar[bool] = True  # type: ignore[misc]

    places: list[Tensor]
    values: list[Tensor]

    def __init__(self, benchmark: Benchmark, items: Sequence[Item]) -> None:
        super().__init__()
        self.benchmark, self.items = benchmark, list(items)
        self.names = list(benchmark.terms)
        self.add_state("places", [], dist_reduce_fx="cat")
        self.add_state("values", [], dist_reduce_fx="cat")

    def rows(self, terms: Sequence[Terms]) -> Float[Tensor, "N K"]:
        """Terms of single items as :meth:`update` takes them."""
        rows = [[row.get(name, float("nan")) for name in self.names] for row in terms]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(self.names))

    def update(self, places_N: Int[Tensor, "N"], terms_NK: Float[Tensor, "N K"]) -> None:
        """Adds items: their places in the list, and a column for each of the benchmark's terms."""
        self.places.append(places_N)
        self.values.append(terms_NK)

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        """Every measure so far; NaN where it has no item."""
        if not len(self.places):
            return {}
        places_N = _joined(self.places).cpu().numpy()
        values_NK = _joined(self.values).double().cpu().numpy()
        seen, index_N = np.unique(places_N, return_inverse=True)
        sums = np.zeros((len(seen), len(self.names)))
        np.add.at(sums, index_N, values_NK)
        means = sums / np.bincount(index_N)[:, None]
        items = [self.items[place] for place in seen]
        _, groups = _columns(items, [])
        columns = dict(zip(self.names, means.T, strict=True))
        found = self.benchmark.measures(Scored(columns, groups, np.ones((1, len(items)))))
        return {name: torch.tensor(float(value[0])) for name, value in found.items()}


def _joined(parts: list[Tensor] | Tensor) -> Tensor:
    """A state is one tensor after processes were joined."""
    return parts if isinstance(parts, Tensor) else torch.cat(parts)
