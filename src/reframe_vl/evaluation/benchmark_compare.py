"""Two checkpoints on the same items: which flipped, by how much, and whether by chance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from reframe_vl.evaluation.benchmark_results import Entry, contrast
from reframe_vl.evaluation.benchmark_scores import Terms
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item
from reframe_vl.evaluation.rules.scores import interval_of

_FLIPS = 10_000
_MAX_DRAWS = 2**22


def compared(
    benchmark: Benchmark,
    items: Sequence[Item],
    ours: Mapping[str, Mapping[str, Terms]],
    theirs: Mapping[str, Mapping[str, Terms]],
) -> dict[str, Any]:
    """Our scores less theirs, in each condition that both have, on the items that both have.

    Gained and lost are the items whose score went up and down: of right and wrong answers those
    that flipped.
    """
    found: dict[str, Any] = {}
    for name in (name for name in ours if name in theirs):
        shared = [i for i in items if i.sample.id in ours[name] and i.sample.id in theirs[name]]
        if not shared:
            continue
        differences: dict[str, Entry] = {}
        for measure, draws in contrast(
            benchmark, shared, [(1.0, ours[name]), (-1.0, theirs[name])]
        ).items():
            interval = interval_of(draws)
            differences[measure] = interval.to_dict() if interval is not None else None
        deltas = {
            i.sample.id: ours[name][i.sample.id]["score"] - theirs[name][i.sample.id]["score"]
            for i in shared
        }
        found[name] = {
            "items": len(shared),
            "differences": differences,
            "gained": [item for item, delta in deltas.items() if delta > 0],
            "lost": [item for item, delta in deltas.items() if delta < 0],
            "p_value": sign_flip_p(
                np.array(list(deltas.values()), np.float64), [i.cluster for i in shared]
            ),
        }
    return found


def sign_flip_p(
    deltas_N: Float[np.ndarray, "N"],
    clusters: Sequence[Hashable],
    flips: int = _FLIPS,
    seed: int = 0,
) -> float:
    """Two-sided P of a mean difference at least as far from 0 if the checkpoints were alike.

    Then each cluster's difference could as well have the other sign. All sign patterns are taken
    where there are no more than ``flips`` of them, else so many random ones and the seen one.

    Args:
        deltas_N: Differences of items.
        clusters: Items of one cluster have one sign.
    """
    known: dict[Hashable, int] = {}
    cluster_of_N = np.array([known.setdefault(c, len(known)) for c in clusters], np.int64)
    sums_C = np.bincount(cluster_of_N, weights=deltas_N)
    sums_C = sums_C[sums_C != 0]
    if not len(sums_C):
        return 1.0
    seen = abs(sums_C.sum()) - 1e-9
    if 2 ** len(sums_C) <= flips:
        patterns = np.arange(2 ** len(sums_C))[:, None] >> np.arange(len(sums_C)) & 1
        return float((abs((1 - 2 * patterns) @ sums_C) >= seen).mean())
    rng = np.random.default_rng(seed)
    as_far = 0
    for rows in np.array_split(np.arange(flips), -(-flips * len(sums_C) // _MAX_DRAWS)):
        signs = 1 - 2 * rng.integers(2, size=(len(rows), len(sums_C)))
        as_far += int((abs(signs @ sums_C) >= seen).sum())
    return (as_far + 1) / (flips + 1)
