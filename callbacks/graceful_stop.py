"""Stops a run on a signal: after the step, with a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)


class GracefulStop(Callback):
    """The handler only sets a flag: a checkpoint written inside a handler can be corrupt.

    Args:
        signals: Names of the signals; a second Ctrl-C ends the process at once.

    Attributes:
        received: The signal that ends the run, on whichever rank it was got.
    """

    def __init__(
        self, signals: Sequence[str] = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    ) -> None:
        """Handlers are installed when a fit is set up."""
        self.signals = [signal.Signals[name] for name in signals]
        self.received: signal.Signals | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the signals over, before there is a first step to wait for."""
        if stage == "fit":
            self._previous = {number: signal.getsignal(number) for number in self.signals}
            self._take_over()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes them over once more: Lightning has put handlers of its own in front by now."""
        self._take_over()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends training after the step; the checkpoint callback saves whenever it is to end."""
        if trainer.world_size > 1:
            # A signal reaches ranks at different moments: all end after the same step.
            own = torch.tensor(float(self.received or 0), device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(own, reduce_op="max"))
            self.received = signal.Signals(number) if number else None
        if self.received is not None:
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _take_over(self) -> None:
        for number in self.signals:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Clusters send theirs several times: they do not mean to hurry.
        if self.received is not None and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.received is None:
            self.received = signal.Signals(number)
            hint = " Once more stops at once." if number == signal.SIGINT else ""
            logger.warning("%s: stopping after this step.%s", self.received.name, hint)
