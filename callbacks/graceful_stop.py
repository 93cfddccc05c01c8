"""Stops a run on a signal: after the step, with a checkpoint, and with word on how to go on."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)


class GracefulStop(Callback):
    """The handler only sets a flag: a checkpoint written inside a handler can be corrupt.

    Args:
        resume_hint: The command that goes on from here.
        signals: Names of the signals; a second one ends the process at once.
    """

    def __init__(self, resume_hint: str, signals: tuple[str, ...] = ("SIGINT", "SIGTERM")) -> None:
        """Handlers are installed when training starts."""
        self.resume_hint = resume_hint
        self.signals = [signal.Signals[name] for name in signals]
        self.received: signal.Signals | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals over, Lightning's own handlers included."""
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._handle)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends training after the step; the checkpoint callback saves whenever it is to end."""
        if self.received is not None:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says how to go on, now that all is saved."""
        if self.received is not None:
            logger.warning(
                "%s: stopped after %d steps. To go on: %s",
                self.received.name,
                trainer.current_epoch,
                self.resume_hint,
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)
        logger.warning("%s: stopping after this step. Once more stops at once.", self.received.name)
