"""One line of progress: step, reward, call rate, IoU, tokens a second; and how long a step took."""

from __future__ import annotations

import time

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reframe_vl.algorithms.module import PolicyModule

_SHOWN = {
    "reward": "reward",
    "call_rate": "calls",
    "gated": "gated",
    "reward/grounding": "IoU",
}


class ProgressLine(Callback):
    """A live line on a terminal; elsewhere a plain line every so many steps.

    Args:
        every: Steps between plain lines.
    """

    def __init__(self, every: int = 10) -> None:
        """Makes the display; it starts with training."""
        self.every = every
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the display."""
        if not trainer.is_global_zero or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        total = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
        self._bar.add_task("", total=total, completed=trainer.current_epoch)
        self._bar.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A step begins with its generation."""
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the step, and logs its time."""
        if not isinstance(pl_module, PolicyModule):
            return
        groups = pl_module.loader.groups
        numbers = pl_module.loader.statistics()
        tokens = sum(len(c) for g in groups for r in g.rollouts for c in r.contexts)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = tokens / seconds
        pl_module.log_step({"time/step_s": seconds, "time/tokens_per_s": rate})
        if not trainer.is_global_zero:
            return
        shown = [f"{label} {numbers[key]:.2f}" for key, label in _SHOWN.items() if key in numbers]
        text = "  ".join([*shown, f"{rate:,.0f} tokens/s"])
        step = trainer.current_epoch + 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        elif step % self.every == 0 or step == trainer.max_epochs:
            self._console.print(f"step {step}/{trainer.max_epochs}  {text}", highlight=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the display."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Gives the terminal back also where training fails."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
