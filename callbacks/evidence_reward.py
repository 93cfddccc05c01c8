"""Scores rollouts with answer, call, grounding and validity terms."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.rollout import RolloutCallback, find_callback
from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.schedules import call_decay
from reframe_vl.types import Rollout, Sample


class EvidenceRewardCallback(Callback):
    """Sets each rollout's components and total, and logs the weight of the call term.

    Args:
        weights: Of the terms; 0 switches one off.
    """

    def __init__(self, weights: RewardWeights) -> None:
        """Keeps the weights."""
        self.weights = weights
        self._progress = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hands the reward to the rollouts."""
        if stage == "fit":
            find_callback(trainer, RolloutCallback, type(self).__name__).score = self._score

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs f(p) times its weight; the components are logged with the rollouts."""
        decay = call_decay(self._progress, self.weights.kappa)
        if isinstance(pl_module, PolicyModule):
            pl_module.log_step({"reward_weight/call": self.weights.call * decay})

    def _score(self, rollout: Rollout, sample: Sample, progress: float) -> None:
        self._progress = progress
        rollout.rewards, rollout.reward = score(rollout, sample, self.weights, progress)
