"""Keeps the forwards of ranks alike, where parameters or gradients are spread over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

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
        missing = self.most(max(len(bins), 1), device) - len(bins)
        return [[*members, filler] for members in [*bins, *([()] * missing)]]

    def most(self, number: int, device: torch.device) -> int:
        """The largest of the ranks' numbers."""
        largest = torch.tensor(number, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)


class GradientOrder:
    """Proves that gradients arrive in the same order on all ranks.

    DeepSpeed's ZeRO adds up what is at the same place of each rank's bucket, and fills buckets as
    gradients arrive: in another order they would be added to those of other parameters.

    Args:
        parameters: What is trained, in the same order on all ranks.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Begins to watch."""
        self._seen = 0
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def _arrived(self, number: int, parameter: Tensor) -> None:
        self._seen = hash((self._seen, number))

    def check(self, device: torch.device) -> None:
        """Compares the order so far with that of the other ranks, which call this together.

        Raises:
            RuntimeError: The orders differ.
        """
        # The largest, and by its complement the smallest: they are one where all are.
        ends = torch.tensor([self._seen, ~self._seen], device=device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if int(ends[0]) != ~int(ends[1]):
            raise RuntimeError(
                "Gradients of this micro-batch arrived in another order on this rank than on "
                "others, so DeepSpeed has added up those of different parameters: the update "
                "would be wrong, and training ends before it. Take strategy=fsdp2 or ddp, whose "
                "sums do not depend on the order; checkpoints written before are sound."
            )
