"""Ends its own process with SIGKILL at a chosen point of a run, as a cluster would."""

import os
import signal

from lightning.pytorch import Callback

from reframe_vl import strategies


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
        save = strategies.save_file

        def dying_save(state, path):
            if self.point == "checkpoint" and state["epoch"] == self.step:
                # As if the disk had got half of it.
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"PK half a checkpoint")
                os.kill(os.getpid(), signal.SIGKILL)
            save(state, path)

        strategies.save_file = dying_save

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.die(trainer, "accumulation" if batch_idx == 0 else "update")
