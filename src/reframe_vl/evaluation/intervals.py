"""Confidence intervals of means over items: the hierarchical bootstrap of docs/method.md, 1.6."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

_MAX_DRAWS = 2**22
"""Media draws held at once: it bounds the memory of a large test set."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """As it stands in results.json."""
        return asdict(self)


def hierarchical_interval(
    values_N: Float[np.ndarray, "N"],
    media: Sequence[Hashable],
    *,
    bases: Sequence[Hashable] | None = None,
    seeds: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean of item values and its percentile bootstrap interval.

    A run is one (base, seed). Bases are drawn, then seeds of each drawn base, then media; each
    time with replacement. All runs see the same draw of media, since they are measured on the
    same items: what makes an item easy does not average out over runs. With one run it is the
    cluster bootstrap over media.

    Every base counts the same in the mean, and so does every seed of a base. For paired
    comparisons the values are the items' differences.

    Args:
        values_N: One value an item and run.
        media: What each value's item looks at: items of one medium are drawn together.
        bases: The base checkpoint that each value is from; None where there is one.
        seeds: The training seed that each value is from; None where there is one.
        strata: The set of items that each value is from; None where there is one. Media are drawn
            within each set, and sets count the same in the mean, whatever their sizes.
        level: Share of the bootstrap distribution inside the interval.
        resamples: Bootstrap draws.
        seed: Of the draws.

    Raises:
        ValueError: There are no values, or the labels do not fit them in number, or a run has
            no value in one of the sets.
    """
    bases = bases if bases is not None else [0] * len(values_N)
    seeds = seeds if seeds is not None else [0] * len(values_N)
    strata = strata if strata is not None else [0] * len(values_N)
    labels = (media, bases, seeds, strata)
    if any(len(values_N) != len(given) for given in labels) or not len(values_N):
        raise ValueError(
            f"{len(values_N)} values, {len(media)} media, {len(bases)} bases, {len(seeds)} seeds "
            f"and {len(strata)} sets: give one of each for every value, and at least one value."
        )
    run_of_N, num_runs = _codes(list(zip(bases, seeds, strict=True)))
    stratum_of_N, num_strata = _codes(strata)
    base_of_N, _ = _codes(bases)
    base_of_R = base_of_N[[int(np.argmax(run_of_N == run)) for run in range(num_runs)]]

    rng = np.random.default_rng(seed)
    means_R, means_BR = np.zeros(num_runs), np.zeros((resamples, num_runs))
    for stratum in range(num_strata):
        held_N = stratum_of_N == stratum
        medium_of_N, num_media = _codes([m for m, held in zip(media, held_N, strict=True) if held])
        sums_RM, counts_RM = np.zeros((2, num_runs, num_media))
        np.add.at(sums_RM, (run_of_N[held_N], medium_of_N), np.asarray(values_N)[held_N])
        np.add.at(counts_RM, (run_of_N[held_N], medium_of_N), 1.0)
        if not counts_RM.any(1).all():
            raise ValueError("A run has no value in one of the sets: leave it out, or the set.")
        means_R += sums_RM.sum(1) / counts_RM.sum(1) / num_strata
        means_BR += _resample_media(sums_RM, counts_RM, resamples, rng) / num_strata
    drawn_B = _resample_runs(means_BR, base_of_R, rng)
    value = np.mean([means_R[base_of_R == base].mean() for base in np.unique(base_of_R)])
    low, high = np.quantile(drawn_B, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def _codes(labels: Sequence[Hashable]) -> tuple[npt.NDArray[np.int64], int]:
    known: dict[Hashable, int] = {}
    codes = np.array([known.setdefault(label, len(known)) for label in labels], np.int64)
    return codes, len(known)


def _resample_media(
    sums_RM: Float[np.ndarray, "R M"],
    counts_RM: Float[np.ndarray, "R M"],
    resamples: int,
    rng: np.random.Generator,
) -> Float[np.ndarray, "B R"]:
    """The mean of each run under draws of media that all runs share."""
    num_media = sums_RM.shape[1]
    parts = []
    for rows in np.array_split(np.arange(resamples), -(-resamples * num_media // _MAX_DRAWS)):
        draws = rng.integers(num_media, size=(len(rows), num_media))
        flat = draws + num_media * np.arange(len(rows))[:, None]
        times_BM = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape).astype(float)
        counts_BR = times_BM @ counts_RM.T
        # A run measured on few of the media may be missed by a draw: then its own mean stands.
        means_BR = np.tile(sums_RM.sum(1) / counts_RM.sum(1), (len(rows), 1))
        np.divide(times_BM @ sums_RM.T, counts_BR, out=means_BR, where=counts_BR > 0)
        parts.append(means_BR)
    return np.concatenate(parts)


def _resample_runs(
    means_BR: Float[np.ndarray, "B R"], base_of_R: Int[np.ndarray, "R"], rng: np.random.Generator
) -> Float[np.ndarray, "B"]:
    """The mean over drawn bases of the mean over drawn seeds of each."""
    resamples = len(means_BR)
    runs = np.argsort(base_of_R, kind="stable")
    seeds_of_base = np.bincount(base_of_R)
    first_run = np.cumsum(seeds_of_base) - seeds_of_base
    bases_BK = rng.integers(len(seeds_of_base), size=(resamples, len(seeds_of_base)))
    sizes_BK = seeds_of_base[bases_BK]
    uniforms_BKS = rng.random((*bases_BK.shape, int(seeds_of_base.max())))
    seeds_BKS = (uniforms_BKS * sizes_BK[..., None]).astype(np.int64)
    chosen_BKS = runs[first_run[bases_BK][..., None] + seeds_BKS]
    drawn_BKS = means_BR[np.arange(resamples)[:, None, None], chosen_BKS]
    counted_BKS = np.arange(uniforms_BKS.shape[-1]) < sizes_BK[..., None]
    means_B: npt.NDArray[np.float64] = ((drawn_BKS * counted_BKS).sum(-1) / sizes_BK).mean(-1)
    return means_B
