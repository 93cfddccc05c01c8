"""Ground drop: which rollouts of a group lose the original visual input (docs/method.md, 1.1)."""

from __future__ import annotations

from typing import Literal

import numpy as np

DropMode = Literal["bernoulli", "stratified"]


def draw_drops(
    num_rollouts: int, probability: float, mode: DropMode, rng: np.random.Generator
) -> list[bool]:
    """Draws d_i for the rollouts of one group, before any of them starts.

    Args:
        num_rollouts: G.
        probability: P(d_i = 1).
        mode: ``bernoulli`` as in the paper; ``stratified`` (ours) gives each side its expected
            share in random order, and at least two members where it has any: a member alone in
            its subgroup has advantage 0 and teaches nothing.
        rng: The group's own generator.

    Raises:
        ValueError: The probability is not one, or the mode is unknown.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"The drop probability must lie in [0, 1], not {probability}.")
    if mode == "bernoulli":
        return (rng.random(num_rollouts) < probability).tolist()
    if mode != "stratified":
        raise ValueError(f"Unknown drop mode {mode!r}: choose bernoulli or stratified.")
    dropped = round(probability * num_rollouts)
    if dropped == 1:
        dropped = 2 if num_rollouts >= 4 else 0
    if num_rollouts - dropped == 1:
        dropped = num_rollouts - 2 if num_rollouts >= 4 else num_rollouts
    return rng.permutation([True] * dropped + [False] * (num_rollouts - dropped)).tolist()
