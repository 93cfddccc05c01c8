"""Saves the run: every so many steps, and whenever training is to end."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from reframe_vl.checkpoint.reading import form_of
from reframe_vl.checkpoint.writing import CheckpointWriter, remove, remove_leftovers
from reframe_vl.strategies import use_writer

logger = logging.getLogger(__name__)


class RunCheckpoint(Checkpoint):
    """Checkpoints after a step's last update, never in the middle of one.

    Lightning runs callbacks of this kind last, so what the others wrote of the step, and their wish
    to stop, are known by then. Each checkpoint appears when it is complete, and older ones go only
    then: whatever ends the process, the last complete one is there.

    Args:
        folder: Where checkpoints go, as ``step_000019.ckpt`` after step 19.
        every: Steps between checkpoints.
        keep: The newest so many are kept; null keeps all.
        best: Also keep the checkpoint at which this number was largest, such as
            ``val/accuracy/tools``; null for none.
        background: Write while training goes on, from a copy of the state in the CPU's memory.

    Attributes:
        best_step: The step of the best checkpoint so far; None before the first.
        best_value: Its number.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int,
        keep: int | None = 1,
        best: str | None = None,
        background: bool = True,
    ) -> None:
        """Nothing is written before the first checkpoint is due.

        Raises:
            ValueError: ``every`` or ``keep`` is below 1.
        """
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"callbacks.checkpoint.{name} is {value}: set it to at least 1.")
        self.folder, self.every, self.keep, self.best = Path(folder), every, keep, best
        self.best_step: int | None = None
        self.best_value = -math.inf
        self._writer = CheckpointWriter(background)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Has the strategy write whole checkpoints."""
        if stage != "fit":
            return
        use_writer(trainer.strategy, self._writer)
        if trainer.is_global_zero and self.folder.is_dir():
            remove_leftovers(self.folder)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves where it is time to, at the last step, and before training stops early."""
        step = trainer.current_epoch
        last = step + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps
        if (step + 1) % self.every and not last and not trainer.should_stop:
            return
        self._writer.wait()
        if trainer.is_global_zero:
            self._remove_old()
        self._compare(trainer, step)
        trainer.save_checkpoint(self._path(step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until the last one is on disk."""
        self._writer.wait()
        if trainer.is_global_zero:
            self._remove_old()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the thread."""
        self._writer.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finishes what is being written; where that fails too, the first error matters more."""
        try:
            self._writer.close()
        except OSError as failure:
            logger.error("%s", failure)

    def state_dict(self) -> dict[str, Any]:
        """The best so far."""
        return {"best_step": self.best_step, "best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on comparing with the best."""
        self.best_step = state_dict.get("best_step")
        self.best_value = state_dict.get("best_value", -math.inf)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.ckpt"

    def _compare(self, trainer: Trainer, step: int) -> None:
        value = trainer.callback_metrics.get(self.best) if self.best else None
        if value is not None and float(value) > self.best_value:
            self.best_step, self.best_value = step, float(value)

    def _remove_old(self) -> None:
        """Removes all but the newest and the best of the complete ones."""
        if not self.keep:
            return
        whole = [path for path in sorted(self.folder.glob("step_*.ckpt")) if form_of(path)]
        best = None if self.best_step is None else self._path(self.best_step)
        for old in whole[: -self.keep]:
            if old != best:
                remove(old)
