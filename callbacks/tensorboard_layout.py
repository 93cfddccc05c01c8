"""Puts the curves that matter first on TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

Charts = Mapping[str, Sequence[str]]
"""Names of charts, and of the curves in each; those that a run does not have are left out."""

LAYOUT: Mapping[str, Charts] = {
    "1 Does it learn": {
        "reward": ["rollouts/reward"],
        "parts of the reward": [
            "rollouts/reward/answer",
            "rollouts/reward/call",
            "rollouts/reward/grounding",
            "rollouts/reward/penalty",
            "rollouts/reward/tool_use",
        ],
        "held-out accuracy": [
            "val/accuracy/tools",
            "val/accuracy/no_tools",
            "val/accuracy/conflict",
        ],
    },
    "2 Does it look": {
        "calls": ["rollouts/call_rate", "rollouts/parse_rate", "val/call_rate"],
        "grounding": ["rollouts/reward/grounding", "val/grounding_iou"],
        "tool gain": ["val/tool_gain"],
        "drop and gate": ["rollouts/dropped", "rollouts/gated", "rollouts/interventions"],
    },
    "3 Is it healthy": {
        "alarms": ["health/alarm"],
        "seconds a step": ["time/step_s"],
        "entropy": ["train/entropy"],
        "engine and trainer": ["train/sampler_gap", "train/sampler_gap_max"],
        "no signal": ["rollouts/dead_groups", "rollouts/not_scorable", "rollouts/blank_views"],
        "how rollouts end": [
            "rollouts/termination/answered",
            "rollouts/termination/no_answer",
            "rollouts/termination/truncated",
            "rollouts/termination/max_turns",
            "rollouts/termination/refusal_streak",
            "rollouts/termination/error",
        ],
    },
    "4 The loss": {
        "loss": ["train/loss"],
        "distance to the teachers": ["train/kl", "train/image/kl", "train/video/kl"],
        "injected calls": ["train/injected_nll"],
        "clipped and masked": [
            "train/clip_low",
            "train/clip_high",
            "train/importance_masked",
            "train/image/dropped",
            "train/video/dropped",
        ],
        "sizes": ["rollouts/sampled_tokens", "rollouts/visual_tokens", "rollouts/turns"],
    },
}


class TensorBoardLayout(Callback):
    """Writes the layout of the tab Custom Scalars; all curves stay under Scalars as well.

    Args:
        layout: Charts by category; None takes ``LAYOUT``.
    """

    def __init__(self, layout: Mapping[str, Charts] | None = None) -> None:
        """Nothing is written before training starts."""
        self.layout = LAYOUT if layout is None else layout

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes it once; a run that goes on writes it again, and the last one counts."""
        if not trainer.is_global_zero:
            return
        charts = {
            category: {
                # Patterns: without its ends, a name would take in those that begin with it.
                name: ["Multiline", [f"^{curve}$" for curve in curves]]
                for name, curves in charts.items()
            }
            for category, charts in self.layout.items()
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(charts)
