"""Merges the policy with other checkpoints of its base, while and after it trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.graceful_stop import GracefulStop
from reframe_vl.checkpoint.card import model_card
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.checkpoint.folder import Checkpoint
from reframe_vl.checkpoint.merge import MergeSettings, merge_checkpoints, open_source
from reframe_vl.checkpoint.writing import aside
from reframe_vl.policy.hub import local_folder

logger = logging.getLogger(__name__)


class CheckpointMerge(Callback):
    """Writes ``step_000019/`` after step 19: a transformers folder of the merged model.

    The policy itself is not changed. With adapters, they are merged into its weights first.

    Args:
        checkpoints: Folders of other checkpoints or LoRA adapters of the base; with none, the
            policy alone is written.
        base: What all of them were trained from: a folder, or a name on the model hub.
        folder: Where merges go.
        settings: How to merge; the policy's weight comes first.
        every: Steps between merges; 0 for one at the end alone.
        config: The run's settings, for the model card; None leaves them out.
    """

    def __init__(
        self,
        checkpoints: Sequence[str | Path],
        base: str | Path,
        folder: str | Path,
        settings: MergeSettings,
        every: int = 0,
        config: str | Path | None = None,
    ) -> None:
        """Everything is checked at once, not at the first merge.

        Raises:
            FileNotFoundError: A folder is missing, or lacks a file.
            ValueError: A number cannot be used, or a checkpoint does not fit the base.
        """
        if every < 0:
            raise ValueError(
                f"callbacks.checkpoint_merge.every is {every}: give the steps between two merges, "
                "or 0 for one at the end."
            )
        self.checkpoints = [Path(path) for path in checkpoints]
        self.base, self.folder = local_folder(str(base)), Path(folder)
        self.settings, self.every = settings, every
        self.config = None if config is None else Path(config)
        settings.weights_of(1 + len(self.checkpoints))
        opened = Checkpoint.open(self.base)
        for path in self.checkpoints:
            open_source(path, opened)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merges where it is time to, at the last step, and where training stops for good."""
        if not isinstance(pl_module, PolicyModule):
            return
        step = trainer.current_epoch
        # A run that a signal stopped goes on later, and merges then.
        stopped = trainer.should_stop and not any(
            isinstance(callback, GracefulStop) and callback.received is not None
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        due = self.every > 0 and (step + 1) % self.every == 0
        if not (due or stopped or step + 1 == trainer.max_epochs):
            return
        output = self.folder / f"step_{step:06d}"
        if not trainer.is_global_zero:
            # Where weights are spread over ranks, the one that writes needs its parts.
            export_policy(pl_module.components, output, writes=False)
            return
        with aside(self.folder) as place:
            policy = place / "policy"
            # Not rounded yet: the merge casts last.
            export_policy(pl_module.components, policy, dtype=torch.float32)
            merge_checkpoints(
                self.base,
                [policy, *self.checkpoints],
                output,
                self.settings,
                replace=True,
                recorded_as=[
                    f"this run's policy after step {step}",
                    *(str(path.absolute()) for path in self.checkpoints),
                ],
                card=model_card(
                    str(self.base),
                    self.config.read_text() if self.config and self.config.is_file() else "",
                    step + 1,
                    {name: float(value) for name, value in trainer.callback_metrics.items()},
                ),
            )
        logger.info("Merged after step %d: %s", step, output)
