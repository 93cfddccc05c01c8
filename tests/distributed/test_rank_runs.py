"""Whole runs on two ranks, started as anybody starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
# Processes that wait for each other take long where cores are few.
pytestmark = pytest.mark.timeout(1200)


def command(model, logs, *overrides):
    return [
        sys.executable,
        str(ROOT / "src" / "train.py"),
        f"model.path={model}",
        f"paths.log_dir={logs}",
        "steps=2",
        "prompts_per_step=3",
        "rollouts_per_prompt=4",
        "trainer.accumulate_grad_batches=2",
        "callbacks.checkpoint.every=1",
        "evaluation.every=2",
        "evaluation.items=2",
        "evaluation.curve_arms=[tools]",
        "evaluate=false",
        *overrides,
    ]


def start(model, logs, *overrides):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        command(model, logs, *overrides),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finished(model, logs, *overrides):
    process = start(model, logs, *overrides)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    [run] = (logs / "gdgrpo_spatial").iterdir()
    return run


@pytest.fixture(scope="module")
def alone(random_model, tmp_path_factory):
    return finished(random_model, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def together(request, random_model, tmp_path_factory):
    logs = tmp_path_factory.mktemp(request.param)
    return finished(random_model, logs, "trainer.devices=2", f"strategy={request.param}")


def rollouts(run, step):
    """What was played, by sample and number, without numbers that rounding may move."""
    found = {}
    for file in sorted((run / "rollouts").rglob(f"step_{step:06d}.jsonl")):
        for line in map(json.loads, file.open()):
            spans = [span["token_ids"] for context in line["contexts"] for span in context]
            key = line["key"]
            found[key["sample_id"], key["index"]] = (key, line["drop_assigned"], spans)
    return found


def test_ranks_play_the_samples_and_seeds_of_one_process(alone, together):
    for step in range(2):
        expected = rollouts(alone, step)
        assert len(expected) == 12
        assert rollouts(together, step) == expected
    assert len(list((together / "rollouts").glob("rank_*"))) == 2


def test_ranks_learn_what_one_process_learns(alone, together):
    expected = load_file(alone / "policy" / "model.safetensors")
    found = load_file(together / "policy" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The rate of AdamW: where a gradient is nothing but rounding, its sign may differ.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4)


def test_g20_one_rank_writes_the_records_that_are_the_runs(alone, together):
    assert len(list((together / "tensorboard").glob("events*"))) == 1
    assert len((together / "curve.jsonl").read_text().splitlines()) == 2
    assert (together / "policy" / "README.md").is_file()


def test_a_rank_without_samples_does_not_keep_the_others_waiting(random_model, tmp_path):
    run = finished(
        random_model, tmp_path, "trainer.devices=2", "strategy=ddp", "prompts_per_step=1", "steps=1"
    )
    assert len(rollouts(run, 0)) == 4


def children(process):
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# The first rank is watched alike whatever the strategy is.
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", 0), ("ddp", 1), ("fsdp2", 1)])
def test_a_killed_rank_ends_the_others_with_a_clear_error(random_model, tmp_path, strategy, killed):
    process = start(
        random_model,
        tmp_path,
        "trainer.devices=2",
        f"strategy={strategy}",
        "steps=100000",
        "callbacks.checkpoint.every=1000",
        "evaluation.every=0",
    )
    try:
        wait_for(lambda: list(tmp_path.rglob("rank_1/step_000001.jsonl")), 600)
        [child] = children(process.pid)
        os.kill((process.pid, child)[killed], signal.SIGKILL)
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
        wait_for(lambda: not Path(f"/proc/{child}").exists(), 60)
        assert time.monotonic() - began < 60
    finally:
        process.kill()
    assert process.returncode != 0
    assert f"Rank {killed} (process" in output
    assert "go on from the last checkpoint with resume" in output
