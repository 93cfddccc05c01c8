"""Writing a step's rollouts takes no time of the next one, and loses nothing."""

import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train

CONFIGS = Path(__file__).parents[2] / "configs"
register_resolvers()


def short_run(run, steps):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = ["num_threads=1", "evaluate=false", "evaluation.every=0", f"steps={steps}"]
        settings += ["prompts_per_step=1", "rollouts_per_prompt=2", "callbacks.checkpoint.every=1"]
        settings += ["callbacks.checkpoint.keep=null"]
        return compose("train", [f"paths.run_dir={run}", *settings])


def test_a_checkpoint_waits_for_its_steps_rollouts(tmp_path, monkeypatch):
    write = RolloutStore.write

    def slow_write(self, *args):
        time.sleep(1.0)
        return write(self, *args)

    monkeypatch.setattr(RolloutStore, "write", slow_write)
    train(short_run(tmp_path, 2))
    for step in range(2):
        rollouts = tmp_path / "rollouts" / f"step_{step:06d}.jsonl"
        checkpoint = tmp_path / "checkpoints" / f"step_{step:06d}.ckpt"
        assert rollouts.stat().st_mtime <= checkpoint.stat().st_mtime


def test_rollouts_that_cannot_be_written_end_the_run(tmp_path, monkeypatch):
    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RolloutStore, "write", full)
    with pytest.raises(OSError, match="No space left"):
        train(short_run(tmp_path, 1))
