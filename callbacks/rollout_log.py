"""Writes every rollout to disk, and numbers, pictures and transcripts to TensorBoard."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

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
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")
        self._images: Future[None]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cuts what an earlier attempt wrote after the checkpoint."""
        if self.save:
            self._store(trainer).cut(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to write the step's images, beside the update."""
        if self.save and batch_idx == 0 and isinstance(pl_module, PolicyModule):
            store, groups = self._store(trainer), pl_module.loader.groups
            self._images = self._writer.submit(store.write_images, groups)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the step."""
        if not isinstance(pl_module, PolicyModule):
            return
        groups = pl_module.loader.groups
        encoder = Encoder(pl_module.components.tokenizer)
        if self.save:
            # Before the file, which so never names an image that is not there.
            self._images.result()
            self._store(trainer).write(pl_module.step, groups, encoder.decode)
        pl_module.log_dict(
            {f"rollouts/{name}": value for name, value in pl_module.loader.statistics().items()},
            batch_size=1,
            sync_dist=trainer.world_size > 1,
        )
        if self.pictures_every and pl_module.step % self.pictures_every == 0:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                    self._show(logger.experiment, groups, encoder, pl_module.step)

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
