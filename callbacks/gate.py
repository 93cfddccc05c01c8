"""Schedules the observation gate; what it does to a rollout is in ``rollout.gate``."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.rollout import RolloutCallback, find_callback
from reframe_vl.rollout.gate import Gate


class GateCallback(Callback):
    """Sets which of a rollout's calls give way to canonical ones.

    Args:
        threshold: Delta, of progress in [0, 1].
        probability: Of stepping in where the gate could, of progress.
        budget: Interventions of a rollout; None is no bound.
        first_call_only: Look at a rollout's first call alone.
        repair: Off, rollouts go on with their own calls and canonical ones are learned beside them.
    """

    def __init__(
        self,
        threshold: Callable[[float], float],
        probability: Callable[[float], float],
        budget: int | None = None,
        first_call_only: bool = False,
        repair: bool = True,
    ) -> None:
        """Checks the schedules at both ends.

        Raises:
            ValueError: A value is out of its range.
        """
        self.threshold, self.probability = threshold, probability
        self.budget, self.first_call_only, self.repair = budget, first_call_only, repair
        for progress in (0.0, 1.0):
            self._at(progress)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hands the gate to the rollouts, which ask for it when they are generated."""
        if stage == "fit":
            find_callback(trainer, RolloutCallback, type(self).__name__).gate = self._at
            if isinstance(pl_module, PolicyModule):
                pl_module.loader.gate = True

    def _at(self, progress: float) -> Gate:
        return Gate(
            self.threshold(progress),
            self.probability(progress),
            self.budget,
            self.first_call_only,
            self.repair,
        )
