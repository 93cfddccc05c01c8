"""Saves the run: every so many steps, and whenever training is to end."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


class RunCheckpoint(Checkpoint):
    """Checkpoints after a step's last update, never in the middle of one.

    Lightning runs callbacks of this kind last, so what the others wrote of the step, and their wish
    to stop, are known by then.

    Args:
        folder: Where checkpoints go, as ``step_000019.ckpt`` after step 19.
        every: Steps between checkpoints.
        keep: The newest so many are kept; null keeps all.
    """

    def __init__(self, folder: str | Path, every: int, keep: int | None = 1) -> None:
        """Nothing is written before the first checkpoint is due.

        Raises:
            ValueError: ``every`` or ``keep`` is below 1.
        """
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"callbacks.checkpoint.{name} is {value}: set it to at least 1.")
        self.folder, self.every, self.keep = Path(folder), every, keep

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves where it is time to, at the last step, and before training stops early."""
        step = trainer.current_epoch
        last = step + 1 == trainer.max_epochs
        if (step + 1) % self.every and not last and not trainer.should_stop:
            return
        path = self.folder / f"step_{step:06d}.ckpt"
        trainer.save_checkpoint(path)
        if self.keep and trainer.is_global_zero:
            # The new one is complete before an older one goes.
            for old in sorted(self.folder.glob("step_*.ckpt"))[: -self.keep]:
                old.unlink()
