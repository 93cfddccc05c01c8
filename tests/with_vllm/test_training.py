"""Whole runs with rollout=vllm, from their config to their files."""

import os
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reframe_vl.policy.score import score
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.rollout.vllm_engine import VLLMEngine
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train
from vllm_models import command, descendants, sampled, write_hybrid_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
register_resolvers()


def run(folder, *overrides):
    """Trains; the config, what was logged and the rollouts of each step."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose(
            "train",
            [
                f"paths.run_dir={folder}",
                "rollout=vllm",
                "num_threads=1",
                "evaluate=false",
                "evaluation.every=0",
                "callbacks.rollout_log.pictures_every=0",
                *overrides,
            ],
        )
    train(cfg)
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    logged = {tag: [e.value for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    store = RolloutStore(folder / "rollouts")
    steps = [[r for g in store.read(s) for r in g.rollouts] for s in store.steps()]
    return cfg, logged, steps


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_default_experiment_trains(tmp_path, overlap):
    cfg, logged, steps = run(
        tmp_path,
        "experiment=gdgrpo_spatial",
        "steps=3",
        "lr=0.002",
        "warmup_updates=0",
        f"rollout.overlap={str(overlap).lower()}",
    )
    assert [{r.policy_version for r in rollouts} for rollouts in steps] == (
        [{0}, {0}, {1}] if overlap else [{0}, {1}, {2}]
    )
    assert logged["rollouts/lag"] == ([0, 1, 1] if overlap else [0, 0, 0])
    assert max(logged["weights/probe_gap"]) < 1e-4 and max(logged["weights/alarm"]) == 0
    gaps = logged["train/sampler_gap_max"]
    assert max(gaps[:1] if overlap else gaps) < 1e-4
    assert not [r.error for rollouts in steps for r in rollouts if r.error]
    # What was sampled is what the base says of it, with several turns, drops and images.
    rollouts = steps[0]
    assert max(r.num_turns for r in rollouts) > 1 and any(r.dropped for r in rollouts)
    contexts = [c for r in rollouts for c in r.contexts]
    base = instantiate(cfg.model).model
    with base.inference():
        found = score(base, contexts, rollouts[0].sampling).logprobs_T
    torch.testing.assert_close(found, torch.tensor(sampled(contexts)), atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launch", "name"), [(False, "VLLM::EngineCor"), (True, "reframe_vl.rollout.vllm_server")]
)
def test_an_engine_that_is_killed_in_mid_step_costs_no_rollout(tmp_path, monkeypatch, launch, name):
    calls, killed = count(), []
    generate = VLLMEngine.generate

    async def generate_and_kill(self, *args):
        # The second of three steps: each has 16 rollouts of at least one turn.
        if next(calls) == 40:
            killed.extend(pid for pid in descendants(os.getpid()) if name in command(pid))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return await generate(self, *args)

    monkeypatch.setattr(VLLMEngine, "generate", generate_and_kill)
    _, logged, steps = run(
        tmp_path,
        "experiment=gdgrpo_spatial",
        "steps=3",
        "prompts_per_step=4",
        "rollouts_per_prompt=4",
        f"rollout.launch={str(launch).lower()}",
    )
    assert killed
    assert [len(rollouts) for rollouts in steps] == [16, 16, 16]
    assert not [r.error for rollouts in steps for r in rollouts if r.error]
    assert max(logged["train/sampler_gap_max"]) < 1e-4
    assert not [pid for pid in descendants(os.getpid()) if name in command(pid)]


def test_a_hybrid_model_in_bfloat16_runs_two_steps(tmp_path):
    folder = write_hybrid_checkpoint(tmp_path / "model")
    _, logged, steps = run(
        tmp_path / "run",
        f"model.path={folder}",
        "model.family=qwen3_5",
        "model.compact_calls=false",
        "+model.dtype=bfloat16",
        "trainer.precision=bf16-mixed",
        # With it vLLM asks for chunked prefill here, which it does not do with seeds on a CPU.
        "+vllm.enable_prefix_caching=false",
        "steps=2",
        "prompts_per_step=2",
        "rollouts_per_prompt=4",
    )
    assert [len(rollouts) for rollouts in steps] == [8, 8]
    assert not [r.error for rollouts in steps for r in rollouts if r.error]
    # Both round to bfloat16, each in its own way.
    assert max(logged["weights/probe_gap"]) < 0.3
