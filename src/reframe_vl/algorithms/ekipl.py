"""Vision-EKIPL (docs/method.md, 1.5): GRPO on the best of a pool that auxiliary models add to.

    pool (the policy's rollouts and those of others) -> the best G -> GRPO with a KL penalty

What differs from GRPO is which rollouts are compared. The old policy of every token, whoever wrote
it, is the policy before the update, and the KL penalty sees the policy's own tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reframe_vl.algorithms.batching import tokens_of
from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.algorithms.selection import keep_best, pool_numbers
from reframe_vl.types import MicroBatch, Provenance, RolloutGroup


@dataclass(frozen=True)
class EKIPLSettings(GRPOSettings):
    """The loss, and how much of a pool it sees.

    Attributes:
        keep: G, rollouts of a pool that are trained.
        auxiliary_ratio: Correct an auxiliary's tokens by the policy's probability over its own, as
            ``importance`` says; off, they count in full.
    """

    subgroups: bool = False
    keep: int = 8
    auxiliary_ratio: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}: rollouts are compared, so keep 2 or more.")
        if self.auxiliary_ratio and self.importance not in ("truncated", "masked"):
            raise ValueError(
                f"auxiliary_ratio needs importance=truncated or masked, not {self.importance}: "
                "an auxiliary's tokens may be arbitrarily unlikely to the policy."
            )


class EKIPL(GDGRPO):
    """GRPO whose groups are the best of larger pools."""

    settings: EKIPLSettings

    def __init__(self, settings: EKIPLSettings | None = None, **kwargs: Any) -> None:
        """Takes the settings; the rest goes to :class:`PolicyModule`."""
        super().__init__(settings or EKIPLSettings(), **kwargs)

    def compared(self, group: RolloutGroup) -> list[bool]:
        """The best of the pool: a rollout without a reward leaves it smaller."""
        alive_N = torch.tensor(super().compared(group))
        rewards_N = torch.tensor([r.reward or 0.0 for r in group.rollouts], dtype=torch.float64)
        # One group, one seed: any of its rollouts names it.
        seed = group.rollouts[0].key.entropy
        kept: list[bool] = keep_best(rewards_N, alive_N, self.settings.keep, seed).tolist()
        return kept

    def prepare(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """Advantages and micro-batches of one step."""
        batches = super().prepare(groups)
        self._selected = pool_numbers(groups, self.settings.keep)
        if not self.settings.auxiliary_ratio:
            for item in (item for batch in batches for item in batch.items):
                external_T = tokens_of(item.context, Provenance.EXTERNAL)
                item.sampler_logprobs[external_T] = np.nan
        return batches
