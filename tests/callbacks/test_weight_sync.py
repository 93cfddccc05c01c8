import copy
import logging
import math
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reframe_vl.policy.divergence import mean_gap
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train

CONFIGS = Path(__file__).parents[2] / "configs"
register_resolvers()


class CopyEngine:
    """Has weights of its own: a copy of the model, which waits for nobody."""

    shared = False

    def __init__(self, model, deaf=False, **settings):
        self.model, self.deaf, self.log = copy.deepcopy(model), deaf, []

    async def start(self, device):
        self.log.append("start")

    async def sync(self, model, version):
        self.log.append(version)
        if not self.deaf:
            self.model.load_state_dict(model.state_dict())

    async def rest(self):
        self.log.append("rest")

    def open(self, sessions):
        pass

    async def generate(self, session, context, sampling, seed):
        engine = HFEngine(self.model)
        engine.open([session])
        return await engine.generate(session, context, sampling, seed)

    def release(self, session):
        pass

    def close(self):
        self.log.append("close")


def composed(run, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(
            "train",
            [
                f"paths.run_dir={run}",
                "rollout=vllm",
                "num_threads=1",
                "prompts_per_step=2",
                "rollouts_per_prompt=2",
                "steps=3",
                "evaluate=false",
                "evaluation.every=0",
                "callbacks.rollout_log.pictures_every=0",
                *overrides,
            ],
        )


@pytest.fixture
def engines(monkeypatch):
    """The engines that a run makes."""
    made = []

    class Kept(CopyEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr("reframe_vl.rollout.vllm_engine.VLLMEngine", Kept)
    return made


def run(tmp_path, *overrides):
    train(composed(tmp_path, *overrides))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    logged = {tag: [e.value for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    store = RolloutStore(tmp_path / "rollouts")
    versions = [{r.policy_version for g in store.read(s) for r in g.rollouts} for s in range(3)]
    return logged, versions


def test_weights_are_pushed_before_each_steps_rollouts_and_probed(tmp_path, engines):
    logged, versions = run(tmp_path)
    [engine] = engines
    assert engine.log == ["start", 0, "rest", 1, "rest", 2, "rest", "close"]
    assert versions == [{0}, {1}, {2}]
    assert logged["rollouts/lag"] == [0.0, 0.0, 0.0]
    assert max(logged["weights/probe_gap"]) < 1e-4
    assert logged["weights/alarm"] == [0.0, 0.0, 0.0]
    # The engine is not the trainer: ratios are corrected, and are 1 within rounding.
    assert max(logged["train/sampler_gap_max"]) < 1e-4


def test_overlapped_rollouts_are_one_step_behind_and_corrected_for(tmp_path, engines):
    more = ("rollouts_per_prompt=6", "lr=0.01", "warmup_updates=0")
    logged, versions = run(tmp_path, "rollout.overlap=true", *more)
    [engine] = engines
    # None is generated beyond the last step.
    assert engine.log == ["start", 0, 0, 1, "close"]
    assert versions == [{0}, {0}, {1}]
    assert logged["rollouts/lag"] == [0.0, 1.0, 1.0]
    assert logged["train/sampler_gap_max"][0] < 1e-4 < max(logged["train/sampler_gap_max"])


def test_overlap_plays_the_same_samples_with_the_same_drops(tmp_path, engines):
    def played(folder, *overrides):
        run(folder, *overrides)
        groups = [g for step in range(3) for g in RolloutStore(folder / "rollouts").read(step)]
        return [(g.sample.id, [r.drop_assigned for r in g.rollouts]) for g in groups]

    assert played(tmp_path / "a") == played(tmp_path / "b", "rollout.overlap=true")


def test_d16_g01_weights_that_do_not_arrive_raise_an_alarm(tmp_path, engines, caplog):
    with caplog.at_level(logging.ERROR):
        logged, _ = run(tmp_path, "+rollout.engine.deaf=true", "lr=0.05", "warmup_updates=0")
    assert logged["weights/alarm"][0] == 0.0 and logged["weights/alarm"][-1] == 1.0
    assert "rollouts are of another policy" in caplog.text


def test_weights_in_single_precision_that_are_computed_with_in_half_raise_no_alarm(
    tmp_path, engines
):
    logged, _ = run(tmp_path, "trainer.precision=bf16-mixed")
    assert max(logged["weights/probe_gap"]) > 1e-3
    assert logged["weights/alarm"] == [0.0, 0.0, 0.0]


def test_an_engine_of_its_own_needs_somebody_to_keep_it_up_to_date(tmp_path, engines):
    with pytest.raises(RuntimeError, match="weight_sync"):
        run(tmp_path, "callbacks.weight_sync=null")
    assert engines[0].log[-1] == "close"


def test_overlap_needs_an_engine_with_weights_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="rollout=vllm"):
        train(composed(tmp_path, "rollout=hf", "rollout.overlap=true"))


def test_c14_a_probe_leaves_out_what_the_engine_does_not_know_and_nothing_else():
    nan = math.nan
    ours, theirs = np.float32([-1.0, -2.0, -3.0]), np.float32([-1.5, nan, -3.0])
    assert mean_gap(ours, theirs) == 0.25
    assert math.isnan(mean_gap(ours, np.float32([nan] * 3)))
    # The trainer's own have to be numbers, all of them.
    assert math.isnan(mean_gap(np.float32([-1.0, -2.0, nan]), theirs))
    assert mean_gap(np.float32([-1.0, -2.0, -math.inf]), theirs) == math.inf


def test_the_probes_limit_is_a_positive_number():
    node = composed("unused", "callbacks.weight_sync.max_gap=0").callbacks.weight_sync
    with pytest.raises(Exception, match="above 0"):
        instantiate(node)
