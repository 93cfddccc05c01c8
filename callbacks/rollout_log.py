"""Writes every rollout to disk, and numbers, pictures and transcripts to TensorBoard."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.data.media import MediaError
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.picture import draw_rollout
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.rollout.transcript import transcript
from reframe_vl.types import RolloutGroup


class RolloutLog(Callback):
    """Keeps the rollouts of a run.

    Args:
        folder: Of the run's rollouts; each rank has files of its own below it.
        pictures_every: Steps between pictures on TensorBoard; 0 for none.
        pictures: Rollouts shown each time.
        save: Whether rollouts are written to ``folder``.
    """

    def __init__(
        self, folder: str | Path, pictures_every: int = 20, pictures: int = 4, save: bool = True
    ) -> None:
        """Nothing is written before the first step."""
        self.folder = Path(folder)
        self.pictures_every, self.pictures, self.save = pictures_every, pictures, save
        self._writer: ThreadPoolExecutor | None = None
        self._written: Future[Path] | None = None
        self._step = -1
        self._made: Encoder | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cuts what an earlier attempt wrote after the checkpoint."""
        if self.save:
            self._store(trainer).cut(trainer.current_epoch)
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-writer")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the last step, and fails where it could not be written."""
        self._wait()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the thread."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends it also where training fails."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()
        self._writer = self._written = None
        self._step = -1

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Begins to write the step: the backward pass leaves time for it."""
        if isinstance(pl_module, PolicyModule):
            self._begin(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Waits: what comes before a checkpoint is on disk before it is."""
        self._wait()

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def _begin(self, trainer: Trainer, module: PolicyModule) -> None:
        if self._writer is not None and self._step != module.step:
            self._wait()
            self._step = module.step
            self._written = self._writer.submit(
                self._store(trainer).write,
                module.step,
                module.loader.groups,
                self._encoder(module).decode,
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the step; the disk is waited for when the next one is written, or a checkpoint."""
        if not isinstance(pl_module, PolicyModule):
            return
        self._begin(trainer, pl_module)
        groups = pl_module.loader.groups
        numbers = pl_module.loader.statistics()
        pl_module.log_step({f"rollouts/{name}": value for name, value in numbers.items()})
        if self.pictures_every and pl_module.step % self.pictures_every == 0:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                    board, encoder = logger.experiment, self._encoder(pl_module)
                    self._show(board, groups, encoder, pl_module.step)

    def _encoder(self, module: PolicyModule) -> Encoder:
        """Made once: the vocabulary is read for it."""
        if self._made is None:
            self._made = Encoder(module.components.tokenizer)
        return self._made

    def _store(self, trainer: Trainer) -> RolloutStore:
        name = "" if trainer.world_size == 1 else f"rank_{trainer.global_rank}"
        return RolloutStore(self.folder / name)

    def _show(self, board: Any, groups: list[RolloutGroup], encoder: Encoder, step: int) -> None:
        for number, group in enumerate(groups[: self.pictures]):
            rollout = group.rollouts[0]
            try:
                picture = draw_rollout(group.sample, rollout, None, encoder.decode)
            except MediaError:
                continue
            board.add_image(f"rollouts/{number}", picture, step, dataformats="HWC")
            board.add_text(f"rollouts/{number}", transcript(rollout, encoder.decode), step)
