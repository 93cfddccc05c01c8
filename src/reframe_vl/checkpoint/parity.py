"""Compares two policies on fixed probes: a merged or cast checkpoint with the live one."""

from __future__ import annotations

from collections.abc import Sequence

from reframe_vl.policy.loading import Policy
from reframe_vl.policy.score import score
from reframe_vl.types import Context, Sampling


def largest_gap(
    one: Policy, other: Policy, contexts: Sequence[Context], sampling: Sampling
) -> float:
    """The largest difference of the log-probs that two policies give the contexts' own tokens.

    Args:
        one: A policy.
        other: Another one of the same model.
        contexts: The probes, such as those of recorded rollouts.
        sampling: The distribution that log-probs are of.
    """
    found = []
    for policy in (one, other):
        with policy.model.inference():
            found.append(score(policy.model, contexts, sampling).logprobs_T)
    return (found[0] - found[1].to(found[0].device)).abs().max().item()
