"""Runs that die or are stopped go on as if nothing had happened."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
STEPS = 6


def command(model, logs, *overrides):
    return [
        sys.executable,
        str(ROOT / "src" / "train.py"),
        f"model.path={model}",
        f"paths.log_dir={logs}",
        f"steps={STEPS}",
        "prompts_per_step=2",
        "rollouts_per_prompt=4",
        "trainer.accumulate_grad_batches=2",
        "callbacks.checkpoint.every=1",
        "evaluation.every=3",
        "evaluation.items=4",
        "evaluate=false",
        "+callbacks.killer._target_=killer.Killer",
        *overrides,
    ]


def launch(model, logs, *overrides, kill_at=""):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    environment |= {"KILL_AT": kill_at} if kill_at else {}
    return subprocess.run(
        command(model, logs, *overrides),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )


def the_run(logs):
    [run] = (logs / "gdgrpo_spatial").iterdir()
    return run


def kept_files(run):
    files = [run / "policy" / "model.safetensors", run / "curve.jsonl"]
    files += sorted((run / "rollouts").glob("*.jsonl"))
    return {str(f.relative_to(run)): f.read_bytes() for f in files}


def scalar_steps(run, tag):
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    return [event.step for event in board.Scalars(tag)]


@pytest.fixture(scope="module")
def undisturbed(random_model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("undisturbed")
    result = launch(random_model, logs)
    assert result.returncode == 0, result.stderr
    return the_run(logs)


def test_f16_g12_g13_g19_killed_again_and_again_the_same_command_ends_bit_for_bit_the_same(
    random_model, undisturbed, tmp_path
):
    for kill_at in ("0:rollout", "1:accumulation", "2:update", "3:checkpoint", "4:rollout"):
        result = launch(random_model, tmp_path, "resume=auto", kill_at=kill_at)
        assert result.returncode == -signal.SIGKILL, result.stderr
    result = launch(random_model, tmp_path, "resume=auto")
    assert result.returncode == 0, result.stderr
    run = the_run(tmp_path)
    expected = kept_files(undisturbed)
    assert len([name for name in expected if name.startswith("rollouts")]) == STEPS
    assert kept_files(run) == expected
    tag = "rollouts/reward"
    assert scalar_steps(run, tag) == scalar_steps(undisturbed, tag)
    assert len(scalar_steps(run, tag)) == STEPS


def test_g14_a_signal_saves_after_the_step_and_says_how_to_go_on(
    random_model, undisturbed, tmp_path
):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    process = subprocess.Popen(
        command(random_model, tmp_path),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/*/rollouts/step_000001.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    log = next(tmp_path.glob("*/*/train.log")).read_text()
    # The hint is the whole command: overrides and all.
    [hint] = re.findall(r"python (src/train\.py .*resume=\S+)", log)
    result = subprocess.run(
        [sys.executable, *shlex.split(hint)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert kept_files(the_run(tmp_path)) == kept_files(undisturbed)


def test_a_finished_run_is_not_done_again(random_model, tmp_path):
    small = ("steps=1", "data.evaluation_size=4", "evaluate=true", "evaluation.every=0")
    small += ("evaluation.arms=[tools,no_tools]",)
    assert launch(random_model, tmp_path, *small, "resume=auto").returncode == 0
    results = the_run(tmp_path) / "results.json"
    written = results.stat().st_mtime_ns
    assert json.loads(results.read_text())["items"] == 4
    again = launch(random_model, tmp_path, *small, "resume=auto")
    assert again.returncode == 0
    assert "accuracy with tools" in again.stdout
    assert results.stat().st_mtime_ns == written


def test_g17_multirun_floats_stay_floats_and_runs_do_not_share_a_folder(random_model, tmp_path):
    result = launch(random_model, tmp_path, "steps=1", "lr=1e-6,1e-5", "evaluation.every=0", "-m")
    assert result.returncode == 0, result.stderr
    configs = sorted((tmp_path / "gdgrpo_spatial").glob("*/config.yaml"))
    rates = {line for c in configs for line in c.read_text().splitlines() if line.startswith("lr:")}
    assert rates == {"lr: 1.0e-06", "lr: 1.0e-05"}


@pytest.mark.parametrize(
    "override, words",
    [
        ("stepz=3", "Could not override 'stepz'"),
        ("experiment=gdgrpo_spacial", "gdgrpo_spatial"),
        ("data=records", "data.path=FILE.jsonl"),
        ("resume=/nowhere/at/all", "does not exist"),
        ("model.path=/nowhere/at/all", "set model.path"),
        ("reward.groundng=1", "Could not override"),
        ("base=7", "shipped ones are 0 to 2"),
        ("steps=0", "steps=0 must be a whole number of at least 1"),
        ("lr=fast", "lr=fast must be a number"),
    ],
)
def test_a_wrong_override_gets_a_sentence_with_the_remedy(random_model, tmp_path, override, words):
    extra = [] if override.startswith(("model", "base")) else [f"model.path={random_model}"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "src/train.py"), f"paths.log_dir={tmp_path}", *extra, override],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_finished_run_goes_on_where_more_steps_are_asked_for(random_model, tmp_path):
    more = ("run_name=a", "resume=auto", "evaluate=true", "evaluation.base=false")
    more += ("evaluation.arms=[tools]", "data.evaluation_size=4", "evaluation.every=0")
    for steps in (1, 2):
        result = launch(random_model, tmp_path, *more, f"steps={steps}")
        assert result.returncode == 0, result.stderr
        run = the_run(tmp_path)
        assert (run / "results.json").is_file()
        assert len(list((run / "rollouts").glob("*.jsonl"))) == steps
    assert "Going on from" in result.stdout + result.stderr
    assert (run / "policy_1_steps" / "config.json").is_file()
    (run / "results.json").unlink()
    result = launch(random_model, tmp_path, *more, "steps=1")
    assert result.returncode == 1 and "is of 2 steps, and steps=1 are asked" in result.stderr
