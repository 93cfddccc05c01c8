import dataclasses
import logging

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from one_step import fixed_groups
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.health import HealthCallback, HealthLimits
from reframe_vl.rollout.loader import RolloutLoader
from reframe_vl.rollout.statistics import statistics
from reframe_vl.types import CallRecord, CallStatus
from tiny import sampling, tiny_model


def groups():
    made = fixed_groups(tiny_model("qwen3_vl"), sampling())
    for group in made:
        for rollout in group.rollouts:
            rollout.advantage = 1.0
            rollout.calls = [CallRecord(0, "CropImage", {}, CallStatus.OK)]
    return made


class Fake(PolicyModule):
    num_updates, needs_reference, prepare = 1, False, None

    def __init__(self, made):
        torch.nn.Module.__init__(self)
        self.loader = RolloutLoader(1, groups=made)
        self.logged = {}

    def log_step(self, values):
        self.logged |= values


class FakeTrainer(Trainer):
    current_epoch, should_stop, callback_metrics, precision = 0, False, None, ""
    strategy = SingleDeviceStrategy()

    def __init__(self, metrics, precision):
        self.callback_metrics, self.precision = metrics, precision


def watch(made, limits, metrics=None, steps=3, precision="32-true"):
    callback, module = HealthCallback(limits), Fake(made)
    trainer = FakeTrainer(metrics or {}, precision)
    for _ in range(steps):
        callback.on_train_epoch_end(trainer, module)
    return module.logged["health/alarm"], trainer.should_stop


LIMITS = HealthLimits(window=3)


def test_a_healthy_step_raises_no_alarm():
    assert watch(groups(), LIMITS) == (0.0, False)


def test_collapses_are_told_once_and_counted(caplog):
    made = groups()
    for group in made:
        for rollout in group.rollouts:
            rollout.advantage, rollout.calls = 0.0, []
    with caplog.at_level(logging.WARNING):
        alarms, stopped = watch(made, HealthLimits(window=3, stop_after=2), steps=4)
    assert alarms == 2.0 and stopped
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert any("equal rewards" in w for w in warnings)
    assert any("stopped looking" in w for w in warnings)


def test_c17_a_gap_between_engine_and_trainer_raises_an_alarm():
    metrics = {"train/sampler_gap_max": torch.tensor(0.5), "train/entropy": torch.tensor(1e-4)}
    assert watch(groups(), LIMITS, metrics)[0] == 2.0


def test_in_half_precision_the_mean_over_tokens_is_compared():
    metrics = {"train/sampler_gap_max": torch.tensor(0.5), "train/sampler_gap": torch.tensor(0.02)}
    assert watch(groups(), LIMITS, metrics, precision="bf16-true")[0] == 0.0
    metrics["train/sampler_gap"] = torch.tensor(0.2)
    assert watch(groups(), LIMITS, metrics, precision="bf16-true")[0] == 1.0


def test_rollouts_that_are_a_step_behind_raise_no_alarm_for_it():
    metrics = {"train/sampler_gap_max": torch.tensor(0.5), "rollouts/lag": torch.tensor(1.0)}
    assert watch(groups(), LIMITS, metrics)[0] == 0.0
    metrics["rollouts/lag"] = torch.tensor(0.0)
    assert watch(groups(), LIMITS, metrics)[0] == 1.0


def test_d20_unscorable_rollouts_are_a_rate_of_their_own():
    made = groups()
    for rollout in made[0].rollouts:
        rollout.reward = None
    numbers = statistics(made)
    assert numbers["not_scorable"] == (4 + 1) / 20
    assert watch(made, LIMITS)[0] == 1.0


def test_statistics_count_refusals_by_reason_and_leave_the_gates_calls_out():
    made = groups()
    refused = CallRecord(0, "", {}, CallStatus.REFUSED, reason="not_json")
    gated = CallRecord(0, "CropImage", {}, CallStatus.OK, by_gate=True)
    made[0].rollouts[0].calls = [refused, gated]
    numbers = statistics(made)
    assert numbers["refused/not_json"] == 1 / 20
    assert numbers["parse_rate"] == 19 / 20


def test_d16_views_of_one_colour_raise_an_alarm():
    made = groups()
    maker = tiny_model("qwen3_vl").view_maker
    for rollout in made[0].rollouts + made[1].rollouts:
        spans = rollout.contexts[0].spans
        blank = tuple(maker.view(np.full_like(v.pixels, 90)) for v in spans[0].views)
        spans[0] = dataclasses.replace(spans[0], views=blank)
    assert statistics(made)["blank_views"] == 8 / 20
    assert watch(made, LIMITS)[0] == 1.0
