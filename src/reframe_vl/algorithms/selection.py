"""Which of a step's rollouts are trained.

PyVision-RL (docs/method.md, 1.4) filters groups, ranks them and keeps some. Vision-EKIPL (1.5)
keeps the best of each group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reframe_vl.algorithms.advantages import all_equal
from reframe_vl.algorithms.batching import ALONE, Ranks
from reframe_vl.types import Rollout, RolloutGroup, Termination

logger = logging.getLogger(__name__)

Unit: TypeAlias = Literal["group", "rollout"]


@dataclass(frozen=True)
class Selection:
    """How many of a step's groups are trained.

    Attributes:
        keep: B, groups over all ranks.
        unit: ``group`` keeps groups whole; ``rollout`` keeps B times G single rollouts, in the
            order of their groups.
        rank: By the deviation of their rewards; off: groups that teach something are kept as they
            come.
    """

    keep: int
    unit: Unit = "group"
    rank: bool = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"selection.keep is {self.keep}: it must be at least 1.")
        if self.unit not in get_args(Unit):
            raise ValueError(f"selection.unit is {self.unit!r}: it must be group or rollout.")

    def apply(self, groups: Sequence[RolloutGroup], ranks: Ranks = ALONE) -> dict[str, float]:
        """Takes their advantage from all rollouts that are not to be trained.

        Args:
            groups: Of one size, with advantages; broken rollouts have none.
            ranks: That have the other groups of the step; they are chosen from as if one had all.

        Returns:
            Numbers to log: those of :func:`select`, and ``right_pushed_down``.
        """
        members = [group.rollouts for group in groups]
        table = [[(r.reward or 0.0, r.advantage is not None) for r in group] for group in members]
        tables, mine = ranks.in_order(table)
        rows = torch.tensor(tables)
        kept_PG, numbers = select(
            rows[..., 0], rows[..., 1].bool(), self.keep, self.unit, self.rank
        )
        own = kept_PG[mine].tolist()
        for group, kept_G in zip(members, own, strict=True):
            for rollout, kept in zip(group, kept_G, strict=True):
                rollout.advantage = rollout.advantage if kept else None
        if not kept_PG.any():
            logger.warning("Nothing is learned from this step: no group's rewards differ.")
        return numbers | {"right_pushed_down": right_pushed_down([r for m in members for r in m])}


def overran(rollout: Rollout) -> bool:
    """Whether a rollout was cut because its context was full: broken, like one without a reward."""
    return rollout.termination in (Termination.MAX_TOKENS, Termination.MAX_VISUAL_TOKENS)


def select(
    rewards_PG: Float[Tensor, "P G"],
    whole_PG: Bool[Tensor, "P G"],
    keep: int,
    unit: Unit,
    rank: bool = True,
) -> tuple[Bool[Tensor, "P G"], dict[str, float]]:
    """Chooses rollouts of the groups whose rewards differ most.

    Groups with fewer than two rollouts that are not broken, or with equal rewards, are dropped. The
    others are ranked by the population standard deviation of their rewards, equals in order.
    Deviations that differ by rounding alone are equal.

    Args:
        rewards_PG: Those of broken rollouts may be anything.
        whole_PG: Rollouts that are not broken.
        keep: Groups to keep.
        unit: What is counted, see :class:`Selection`.
        rank: Likewise.

    Returns:
        The rollouts to train, and numbers to log: ``broken`` (rollouts), ``too_small`` and
        ``equal_rewards`` (groups dropped), ``outranked`` (other groups left out), ``kept_groups``,
        ``kept_rollouts``, and ``shortfall`` (groups that were not there to keep).

    Raises:
        ValueError: The reward of a rollout that is not broken is not finite.
    """
    stds: dict[int, float] = {}
    too_small = equal_rewards = 0
    for number, (rewards_G, whole_G) in enumerate(zip(rewards_PG, whole_PG, strict=True)):
        rewards_N = rewards_G[whole_G].double()
        _check_finite(rewards_N)
        if len(rewards_N) < 2:
            too_small += 1
        elif all_equal(rewards_N):
            equal_rewards += 1
        else:
            stds[number] = round(float(rewards_N.std(correction=0)), 6)
    ranked = sorted(stds, key=lambda number: -stds[number]) if rank else list(stds)
    places = [(number, i) for number in ranked for i in whole_PG[number].nonzero().flatten()]
    kept_PG = torch.zeros_like(whole_PG)
    if unit == "group":
        places = [(number, i) for number, i in places if number in ranked[:keep]]
    for number, i in places[: keep * whole_PG.shape[1]]:
        kept_PG[number, i] = True
    kept_groups = int(kept_PG.any(1).sum())
    numbers = {
        "broken": int((~whole_PG).sum()),
        "too_small": too_small,
        "equal_rewards": equal_rewards,
        "outranked": len(ranked) - kept_groups,
        "kept_groups": kept_groups,
        "kept_rollouts": int(kept_PG.sum()),
        "shortfall": max(keep - len(ranked), 0),
    }
    return kept_PG, {name: float(number) for name, number in numbers.items()}


def right_pushed_down(rollouts: Sequence[Rollout]) -> float:
    """Of the trained rollouts with a positive reward, the share whose advantage is negative."""
    signs = [r.advantage < 0 for r in rollouts if r.advantage is not None and (r.reward or 0) > 0]
    return sum(signs) / len(signs) if signs else 0.0


def keep_best(
    rewards_N: Float[Tensor, "N"], alive_N: Bool[Tensor, "N"], keep: int, seed: int
) -> Bool[Tensor, "N"]:
    """The best of a pool by reward; ties are broken at random (Vision-EKIPL).

    Rewards that differ by rounding alone are tied.

    Args:
        rewards_N: Those of rollouts that do not take part may be anything.
        alive_N: Rollouts that take part.
        keep: G; where fewer take part, all of them are kept.
        seed: Of the ties.

    Raises:
        ValueError: The reward of a rollout that takes part is not finite.
    """
    _check_finite(rewards_N[alive_N])
    lots = np.random.default_rng(seed).random(len(rewards_N))
    alive = alive_N.nonzero().flatten().tolist()
    best = sorted(alive, key=lambda i: (-round(float(rewards_N[i]), 6), lots[i]))[:keep]
    kept_N = torch.zeros_like(alive_N)
    kept_N[best] = True
    return kept_N


def _check_finite(rewards_N: Float[Tensor, "N"]) -> None:
    """Refuses what has no place in an order."""
    if not rewards_N.isfinite().all():
        raise ValueError(
            f"The rewards {rewards_N.tolist()} are not all finite, yet their rollouts are marked "
            "as scorable. Let the reward return None where it cannot score a rollout."
        )


def pool_numbers(groups: Sequence[RolloutGroup], keep: int) -> dict[str, float]:
    """What was kept of a step's pools; rollouts with an advantage are.

    Returns:
        Numbers to log: ``own_share`` (of the kept rollouts, those that the policy made itself),
        ``own_share_above`` (of those with an advantage above 0), ``zero_variance`` (groups whose
        kept rollouts teach nothing), ``kept_rollouts``, ``shortfall`` (rollouts that were not
        there to keep), ``not_scorable`` (rollouts of the pools without a reward).
    """
    kept = [[r for r in g.rollouts if r.advantage is not None] for g in groups]
    authors = [(r.key.author, r.advantage or 0.0) for members in kept for r in members]
    above = [author for author, advantage in authors if advantage > 0]
    pools = [r for group in groups for r in group.rollouts]
    return {
        "own_share": sum(not author for author, _ in authors) / max(len(authors), 1),
        "own_share_above": sum(not author for author in above) / max(len(above), 1),
        "zero_variance": float(sum(not any(r.advantage for r in members) for members in kept)),
        "kept_rollouts": float(len(authors)),
        "shortfall": float(sum(max(keep - len(members), 0) for members in kept)),
        "not_scorable": float(sum(r.reward is None for r in pools)),
    }
