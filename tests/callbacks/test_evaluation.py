import json

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.evaluation import EvaluationCallback
from reframe_vl.evaluation.outcomes import Arm
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings


class FakeTrainer(Trainer):
    current_epoch, is_global_zero = 0, True
    strategy = SingleDeviceStrategy()

    def __init__(self, epoch, zero=True):
        self.current_epoch, self.is_global_zero = epoch, zero


class FakeModule(PolicyModule):
    num_updates, needs_reference, prepare = 1, False, None

    def __init__(self):
        pass


class Counting(EvaluationCallback):
    evaluated = ()

    def _evaluate(self, trainer, pl_module, step):
        self.evaluated += (step,)


def made(folder, kind=Counting, every=2, items=4, **kw):
    settings = RolloutSettings(PromptSettings(), Budget(), 1.0, 8)
    return kind(settings, [], folder / "curve.jsonl", every, items, **kw)


def steps(folder):
    return [json.loads(x)["step"] for x in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "torn", ['{"step": 2, "accuracy/to', '{"step"', "2", "[]", "{}", "", "\0\0", '{"step": "4"}']
)
def test_a_line_that_was_cut_short_is_dropped_on_resume(tmp_path, torn):
    lines = ['{"step": 0, "tool_gain": 0.5}', '{"step": 2}', '{"step": 4}', torn]
    (tmp_path / "curve.jsonl").write_text("\n".join(lines))
    callback = made(tmp_path)
    callback.on_train_start(FakeTrainer(2), FakeModule())
    assert (tmp_path / "curve.jsonl").read_text().splitlines() == lines[:2]
    assert [p.name for p in tmp_path.iterdir()] == ["curve.jsonl"]
    assert callback.evaluated == ()


def test_a_curve_whose_only_line_was_cut_short_begins_anew(tmp_path):
    (tmp_path / "curve.jsonl").write_bytes(b'{"step": 0, "x\xff')
    callback = made(tmp_path)
    callback.on_train_start(FakeTrainer(0), FakeModule())
    assert steps(tmp_path) == [] and callback.evaluated == (0,)


def test_a_curve_that_cannot_be_written_is_kept_as_it_was(tmp_path, monkeypatch):
    old = '{"step": 0}\n{"step": 4}\n'
    (tmp_path / "curve.jsonl").write_text(old)

    def full(*_):
        raise OSError("No space left on device.")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        made(tmp_path).on_train_start(FakeTrainer(2), FakeModule())
    assert (tmp_path / "curve.jsonl").read_text() == old


def test_only_the_first_rank_touches_the_curve(tmp_path):
    (tmp_path / "curve.jsonl").write_text('{"step": 4}\n')
    made(tmp_path).on_train_start(FakeTrainer(2, zero=False), FakeModule())
    assert steps(tmp_path) == [4]


def test_arms_are_named_as_in_the_final_table(tmp_path):
    assert made(tmp_path, arms=[True, "tools"]).arms == (Arm.TRUE, Arm.TOOLS)
    assert made(tmp_path, arms=None).arms == tuple(Arm)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"every": -1}, r"evaluation\.every is -1"),
        ({"items": 0}, r"evaluation\.items is 0"),
        ({"arms": ["tool"]}, "no arm 'tool'"),
        ({"arms": "tools"}, "a list such as"),
        ({"arms": []}, "empty"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        made(tmp_path, **changes)
