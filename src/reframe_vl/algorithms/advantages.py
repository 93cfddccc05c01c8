"""Group-relative advantages: how much better a rollout did than its siblings.

Both functions see one group, the rollouts of one sample at one step, so that no statistic can leak
from one prompt to another. They compute in float64 and return float32.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Scale: TypeAlias = Literal["std", "none"]

# Rewards are sums of weighted terms: equal rewards may differ in their last bits. Differences that
# float32 could not hold are no differences.
_EQUAL_REWARDS = 4 * torch.finfo(torch.float32).eps


def group_advantages(
    rewards_G: Float[Tensor, "G"],
    scorable_G: Bool[Tensor, "G"],
    *,
    scale: Scale = "std",
    eps: float = 1e-4,
) -> Float[Tensor, "G"]:
    """Rewards minus the group's mean, in units of its standard deviation where asked for.

    ``A_i = (R_i - mean) / (std + eps)`` (GRPO), or ``A_i = R_i - mean`` for ``scale="none"``
    (PyVision-RL). Mean and population standard deviation are those of the scorable members.

    Args:
        rewards_G: Total rewards; members that are not scorable may hold anything, NaN included.
        scorable_G: Members that take part; the others get 0.
        scale: Whether to divide by the standard deviation.
        eps: Added to the standard deviation.

    Returns:
        Advantages, exactly 0 for all members of a group that teaches nothing: fewer than two
        scorable members, or equal rewards.

    Raises:
        ValueError: If a scorable member's reward is not finite.
    """
    rewards_N = rewards_G[scorable_G].detach().double()
    if not rewards_N.isfinite().all():
        bad = (scorable_G & ~rewards_G.isfinite()).nonzero().flatten().tolist()
        raise ValueError(
            f"The rewards of rollouts {bad} of this group are not finite, yet the rollouts are "
            "marked as scorable. Let the reward return None where it cannot score a rollout."
        )
    advantages_G = torch.zeros(rewards_G.shape, dtype=torch.float32, device=rewards_G.device)
    if len(rewards_N) < 2 or all_equal(rewards_N):
        return advantages_G
    centred_N = rewards_N - rewards_N.mean()
    match scale:
        case "std":
            centred_N = centred_N / (rewards_N.std(correction=0) + eps)
        case "none":
            pass
        case _:
            raise ValueError(f"Unknown advantage scale {scale!r}: use 'std' or 'none'.")
    advantages_G[scorable_G] = centred_N.float()
    return advantages_G


def drop_subgroup_advantages(
    rewards_G: Float[Tensor, "G"],
    dropped_G: Bool[Tensor, "G"],
    scorable_G: Bool[Tensor, "G"],
    *,
    scale: Scale = "std",
    eps: float = 1e-4,
) -> Float[Tensor, "G"]:
    """Advantages within the two drop subgroups of GD-GRPO.

    ``A_i = (R_i - mean_{x,d_i}) / (std_{x,d_i} + eps)``: a rollout that lost its original input is
    compared only with those of the same sample that were to lose theirs.

    Args:
        rewards_G: See ``group_advantages``.
        dropped_G: d_i as drawn *before* the rollout (``Rollout.drop_assigned``). Whether the input
            really left depends on the rollout's own calls and would make the baseline biased.
        scorable_G: See ``group_advantages``.
        scale: See ``group_advantages``.
        eps: See ``group_advantages``.

    Returns:
        Advantages; 0 for the member of a subgroup of one.

    Raises:
        ValueError: If a scorable member's reward is not finite.
    """
    kept_G = group_advantages(rewards_G, scorable_G & ~dropped_G, scale=scale, eps=eps)
    lost_G = group_advantages(rewards_G, scorable_G & dropped_G, scale=scale, eps=eps)
    return torch.where(dropped_G, lost_G, kept_G)


def all_equal(rewards_N: Float[Tensor, "N"]) -> bool:
    """Whether rewards differ by rounding at most; there must be one."""
    low, high = rewards_N.aminmax()
    return bool(high - low <= _EQUAL_REWARDS * rewards_N.abs().max())
