"""Ends its own process with SIGKILL at a chosen point of a run, as a cluster would."""

import os
import signal

from lightning.pytorch import Callback


class Killer(Callback):
    """Dies at ``step:point`` of the environment variable KILL_AT.

    Points: rollout (a turn is being sampled), accumulation (after the first micro-batch), update
    (after the optimiser step, before the checkpoint), checkpoint (while it is written).
    """

    def __init__(self) -> None:
        step, _, self.point = os.environ.get("KILL_AT", "-1:never").partition(":")
        self.step = int(step)

    def die(self, trainer, point):
        if trainer.current_epoch == self.step and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer, pl_module, stage):
        head = type(pl_module.policy).head

        def dying_head(model, hidden):
            self.die(trainer, "rollout" if not model.training else "never")
            return head(model, hidden)

        type(pl_module.policy).head = dying_head
        save = trainer.strategy.checkpoint_io.save_checkpoint

        def dying_save(checkpoint, path, storage_options=None):
            if self.point == "checkpoint" and trainer.current_epoch == self.step:
                # As if the disk had got half of it.
                with open(path, "wb") as stream:
                    stream.write(b"PK half a checkpoint")
                os.kill(os.getpid(), signal.SIGKILL)
            save(checkpoint, path, storage_options)

        trainer.strategy.checkpoint_io.save_checkpoint = dying_save

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.die(trainer, "accumulation" if batch_idx == 0 else "update")
