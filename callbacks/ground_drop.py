"""Schedules ground drop; what it does to a rollout is in ``rollout.episode``."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.callbacks.rollout import RolloutCallback, find_callback
from reframe_vl.rollout.drop import DropMode


class GroundDropCallback(Callback):
    """Sets the probability that a rollout loses its original visual input.

    Args:
        schedule: Of progress in [0, 1]; the paper has a constant 0.5.
        mode: ``bernoulli`` (the paper) or ``stratified`` (ours).
    """

    def __init__(self, schedule: Callable[[float], float], mode: DropMode = "bernoulli") -> None:
        """Checks the schedule at both ends.

        Raises:
            ValueError: It is no probability.
        """
        for progress in (0.0, 1.0):
            if not 0 <= schedule(progress) <= 1:
                raise ValueError(
                    f"The drop probability is {schedule(progress)} at progress {progress}: drop "
                    "must lie between 0 and 1."
                )
        self.schedule, self.mode = schedule, mode

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hands the schedule to the rollouts, which ask for it when they are generated."""
        if stage == "fit":
            rollouts = find_callback(trainer, RolloutCallback, type(self).__name__)
            rollouts.drop_probability, rollouts.drop_mode = self.schedule, self.mode
