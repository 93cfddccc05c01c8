"""The training dataloader: one epoch of it is one reinforcement-learning step.

An epoch generates rollouts with the current policy and yields the step's micro-batches. It is
sized, so Lightning never fetches past the current policy; and since the step's callbacks run before
the epoch's first fetch, schedules are set before generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from reframe_vl.rollout.statistics import statistics
from reframe_vl.types import MicroBatch, RolloutGroup


class Sealed:
    """A micro-batch on its way to the training step, which Lightning does not look into.

    It would go through all of its rollouts for tensors to convert, and refuse what is frozen.
    """

    def __init__(self, batch: MicroBatch) -> None:
        """Keeps it."""
        self.batch = batch


@dataclass
class RolloutLoader:
    """Generates, prepares and yields the micro-batches of one step.

    Attributes:
        num_batches: U updates times K micro-batches.
        generate: Collects and scores the step's groups; set when the engine runs.
        prepare: Turns groups into ``num_batches`` micro-batches; the algorithm's.
        groups: Of the latest step, for whoever logs them.
        gate: Whether the observation gate is at work, and its numbers are counted.
    """

    num_batches: int
    generate: Callable[[], list[RolloutGroup]] | None = None
    prepare: Callable[[list[RolloutGroup]], list[MicroBatch]] | None = None
    groups: list[RolloutGroup] = field(default_factory=list)
    gate: bool = False
    _counted: list[RolloutGroup] | None = None
    _numbers: dict[str, float] = field(default_factory=dict)

    def statistics(self) -> dict[str, float]:
        """What the latest step's rollouts look like, in numbers; computed once for all who ask."""
        if self._counted is not self.groups:
            self._counted, self._numbers = self.groups, statistics(self.groups, self.gate)
        return dict(self._numbers)

    def __len__(self) -> int:
        """Micro-batches of a step."""
        return self.num_batches

    def __iter__(self) -> Iterator[Sealed]:
        """Generates with the current weights, then yields.

        Raises:
            RuntimeError: No rollout callback has connected an engine.
        """
        if self.generate is None or self.prepare is None:
            raise RuntimeError(
                "The loader has no engine: add callbacks/rollout (RolloutCallback) to the trainer."
            )
        self.groups = self.generate()
        batches = self.prepare(self.groups)
        if len(batches) != self.num_batches:
            raise RuntimeError(
                f"The algorithm prepared {len(batches)} micro-batches, but the loader promised "
                f"{self.num_batches}: accumulate_grad_batches times the number of updates."
            )
        yield from map(Sealed, batches)
