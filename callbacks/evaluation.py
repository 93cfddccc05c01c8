"""Evaluates the policy while it trains: learning curves on held-out samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.evaluation.outcomes import named_arms
from reframe_vl.evaluation.policy import evaluate_policy
from reframe_vl.evaluation.report import results
from reframe_vl.files import write_whole
from reframe_vl.policy.sharding import check_gatherable, whole
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.tools.base import Tool, close_tools

logger = logging.getLogger(__name__)


class EvaluationCallback(Callback):
    """Plays some arms every so many steps, and keeps a line for each in ``curve.jsonl``.

    Args:
        settings: How rollouts are played.
        tools: What the policy can call.
        file: Where the learning curve goes; cut to the checkpoint on resume.
        every: Steps between evaluations; 0 for none.
        items: Held-out samples.
        arms: Names of the arms; None for all.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        tools: Sequence[Tool],
        file: str | Path,
        every: int,
        items: int,
        arms: Sequence[str | bool] | None = ("tools", "no_tools", "conflict"),
    ) -> None:
        """Everything is checked at once, not at the first evaluation.

        Raises:
            ValueError: A number is too small, or a name is no arm's.
        """
        if every < 0:
            raise ValueError(
                f"evaluation.every is {every}: give the steps between two evaluations, or 0 for no "
                "learning curve."
            )
        if items < 1:
            raise ValueError(
                f"evaluation.items is {items}: an evaluation needs at least 1 item. For no "
                "learning curve set evaluation.every=0."
            )
        self.settings, self.tools, self.file = settings, list(tools), Path(file)
        self.every, self.items = every, items
        self.arms = named_arms(arms)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cuts the curve to the checkpoint; a fresh run begins with the untrained policy."""
        step = trainer.current_epoch
        begins = self._cut(step) if trainer.is_global_zero else False
        if self.every and trainer.strategy.broadcast(begins):
            self._evaluate(trainer, pl_module, step)

    def _cut(self, step: int) -> bool:
        """Cuts the curve to the checkpoint; whether nothing is left of it."""
        lines = self.file.read_text(errors="replace").splitlines() if self.file.exists() else []
        kept = [line for line in lines if (at := _step(line)) is not None and at <= step]
        write_whole(self.file, "".join(f"{line}\n" for line in kept))
        return not kept

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluates where it is time to."""
        step = trainer.current_epoch + 1
        if self.every and step % self.every == 0:
            self._evaluate(trainer, pl_module, step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops the tools."""
        close_tools(self.tools)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stops them also where training fails."""
        close_tools(self.tools)

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if not isinstance(pl_module, PolicyModule):
            return
        check_gatherable(pl_module.policy, "evaluation.every")
        with whole(pl_module.policy):
            if trainer.is_global_zero:
                self._play(trainer, pl_module, step)

    def _play(self, trainer: Trainer, pl_module: PolicyModule, step: int) -> None:
        data: SampleDataModule = trainer.datamodule  # type: ignore[attr-defined]
        played = evaluate_policy(
            pl_module.components,
            self.settings,
            self.tools,
            data.evaluation_samples(self.items),
            data.conflict_samples(self.items),
            self.arms,
            log_level=logging.DEBUG,
        )
        report = results(played)
        values = {f"accuracy/{a.value}": report["accuracy"][a.value] for a in self.arms}
        values |= {name: report[name] for name in ("tool_gain", "grounding_iou", "call_rate")}
        numbers = {name: entry["value"] for name, entry in values.items() if entry}
        with self.file.open("a") as stream:
            stream.write(json.dumps({"step": step, **numbers}) + "\n")
        trainer.callback_metrics.update(
            {f"val/{name}": torch.tensor(value) for name, value in numbers.items()}
        )
        for board in trainer.loggers:
            # At the step that has just ended, so that a resume from its checkpoint keeps it.
            board.log_metrics({f"val/{k}": v for k, v in numbers.items()}, step=max(step - 1, 0))
        shown = "  ".join(f"{name} {value:.2f}" for name, value in numbers.items())
        logger.info("After step %d on %d items: %s", step, played.num_items, shown)


def _step(line: str) -> int | None:
    """The step of a line of the curve; None where the line was cut short as it was written."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
