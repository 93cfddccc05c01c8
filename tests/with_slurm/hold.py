"""Holds a run in a step until it is signalled, so that a slow SLURM is not too late."""

import time
from pathlib import Path

from lightning.pytorch import Callback

from reframe_vl.callbacks.graceful_stop import GracefulStop


class Hold(Callback):
    """Waits in a step for a signal to the job, or for a file that lets all go on.

    Args:
        step: The step, counted from 0.
        file: The file.
    """

    def __init__(self, step: int, file: str) -> None:
        self.step = step
        self.file = Path(file)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        [stop] = [each for each in trainer.callbacks if isinstance(each, GracefulStop)]
        while (
            trainer.current_epoch == self.step and stop.received is None and not self.file.exists()
        ):
            time.sleep(0.05)
