"""Watches for the ways in which reinforcement learning quietly dies, and says so."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule

logger = logging.getLogger(__name__)

_GAP, _MEAN_GAP = "sampler_gap_max", "sampler_gap"


@dataclass(frozen=True)
class HealthLimits:
    """When to warn; each is compared with the mean of the last ``window`` steps.

    Attributes:
        max_dead_groups: Share of groups whose rollouts all have the same reward.
        min_call_rate: Share of rollouts with a successful call; 0 never warns.
        min_parse_rate: Share of proposed calls that were valid.
        min_entropy: Nats at trained tokens.
        max_sampler_gap: Of one token's log-prob between engine and trainer, in the worst step of
            those whose rollouts are of the weights that were trained; in single precision.
        max_mean_gap: The same of the mean over tokens, in half precision: two programs round
            differently there, and single tokens differ by much.
        max_not_scorable: Share of rollouts that failed by no fault of the policy.
        max_blank_views: Share of rollouts whose first view is of one colour.
        window: Steps.
        stop_after: Steps in a row in alarm after which training ends; 0 never.
    """

    max_dead_groups: float = 0.95
    min_call_rate: float = 0.02
    min_parse_rate: float = 0.5
    min_entropy: float = 0.005
    max_sampler_gap: float = 1e-2
    max_mean_gap: float = 0.1
    max_not_scorable: float = 0.2
    max_blank_views: float = 0.2
    window: int = 10
    stop_after: int = 0


class HealthCallback(Callback):
    """Logs ``health/alarm`` and warns when a measure has collapsed, once per collapse.

    Args:
        limits: When to warn.
    """

    def __init__(self, limits: HealthLimits | None = None) -> None:
        """Keeps the limits."""
        self.limits = limits or HealthLimits()
        self._history: deque[dict[str, float]] = deque(maxlen=self.limits.window)
        self._raised: set[str] = set()
        self._steps_in_alarm = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares the last steps with the limits."""
        if not isinstance(pl_module, PolicyModule):
            return
        measures = pl_module.loader.statistics()
        found = trainer.callback_metrics
        names = ["entropy"]
        # Rollouts that are a step behind differ by what was learned since.
        if not float(found.get("rollouts/lag", 0.0)):
            names.append(_GAP if trainer.precision == "32-true" else _MEAN_GAP)
        for name in names:
            value = found.get(f"train/{name}")
            if value is not None:
                measures[name] = float(value)
        self._history.append(measures)
        alarms = self._alarms()
        for name in sorted(alarms.keys() - self._raised):
            logger.warning("Step %d: %s", trainer.current_epoch, alarms[name])
        self._raised = set(alarms)
        self._steps_in_alarm = self._steps_in_alarm + 1 if alarms else 0
        pl_module.log_step({"health/alarm": float(len(alarms))})
        if self.limits.stop_after:
            stop = self._steps_in_alarm >= self.limits.stop_after
            # Each rank has looked at its own rollouts, and all end together.
            if trainer.strategy.reduce_boolean_decision(stop, all=False):
                logger.error("Training ends: %d steps in alarm.", self.limits.stop_after)
                trainer.should_stop = True

    def _alarms(self) -> dict[str, str]:
        if len(self._history) < self.limits.window:
            return {}
        limits, alarms = self.limits, {}

        def check(name: str, bad: bool, sentence: str) -> None:
            if bad:
                alarms[name] = f"over the last {limits.window} steps {sentence}"

        mean = self._mean
        dead, calls, parsed = mean("dead_groups"), mean("call_rate"), mean("parse_rate")
        failed, entropy = mean("not_scorable"), mean("entropy")
        gap, mean_gap = (
            max(step.get(name, 0.0) for step in self._history) for name in (_GAP, _MEAN_GAP)
        )
        check(
            "dead",
            dead > limits.max_dead_groups,
            f"{dead:.0%} of the groups had equal rewards throughout: nothing is learned from them. "
            "Choose harder or easier samples, more rollouts a prompt, or a denser reward.",
        )
        check(
            "calls",
            calls < limits.min_call_rate,
            f"only {calls:.1%} of the rollouts called a tool: the policy has stopped looking.",
        )
        check(
            "parse",
            parsed < limits.min_parse_rate,
            f"only {parsed:.0%} of the proposed calls were valid; see refused/… for the reasons.",
        )
        check(
            "entropy",
            entropy < limits.min_entropy,
            f"the entropy was {entropy:.4f} nats: the policy hardly explores.",
        )
        check(
            "gap",
            gap > limits.max_sampler_gap or mean_gap > limits.max_mean_gap,
            f"engine and trainer disagreed on log-probs by up to {max(gap, mean_gap):.3g} "
            f"{'a token' if gap else 'in the mean'}: rollouts are off policy. Check weights, "
            "temperature, banned ids and images.",
        )
        blank = mean("blank_views")
        check(
            "blank",
            blank > limits.max_blank_views,
            f"{blank:.0%} of the first views were of one colour: the policy is shown nothing. Look "
            "at the pictures on TensorBoard.",
        )
        check(
            "failed",
            failed > limits.max_not_scorable,
            f"{failed:.0%} of the rollouts could not be scored; their 'error' says why.",
        )
        return alarms

    def _mean(self, name: str) -> float:
        values = [step[name] for step in self._history if name in step]
        # A measure that nobody takes must not alarm.
        return sum(values) / len(values) if values else float("nan")
