"""Keeps the forwards of ranks alike, where each of them holds only a part of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from reframe_vl.types import Context


@dataclass
class Lockstep:
    """As many decoder passes on every rank, each of which reaches every parameter.

    Attributes:
        filler: A short context, which every forward also runs through and whose outcome counts
            nothing: with it also a rank without images, or with nothing to score, takes part.
        group: The ranks; None is all of them.
        begun: Whether there was a forward.
    """

    filler: Context
    group: dist.ProcessGroup | None
    begun: bool = False

    def even(
        self, bins: Sequence[Sequence[int]], filler: int, device: torch.device
    ) -> list[list[int]]:
        """As many bins as the rank with the most has, and at least one; the filler ends each.

        Args:
            bins: Numbers of this rank's contexts.
            filler: The filler's number.
            device: Of the model.
        """
        self.begun = True
        most = torch.tensor(max(len(bins), 1), device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        missing = int(most) - len(bins)
        return [[*members, filler] for members in [*bins, *([()] * missing)]]
