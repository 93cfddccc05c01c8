"""Runs as SLURM jobs: signalled, requeued and resumed; alone, in arrays and in multiruns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/train.sbatch"


def wait_for(pattern, folder, wait_until, job, slurm):
    """Waits for a file of a run, while its job is there."""

    def found():
        assert slurm.state(job) in ("PENDING", "RUNNING"), log_of(folder)
        return next(folder.glob(pattern), None)

    return wait_until(found, pattern, every=0.02)


def log_of(folder):
    return "\n".join(path.read_text() for path in folder.glob("*.out"))


def kept_files(run):
    files = [run / "policy" / "model.safetensors", *sorted((run / "rollouts").glob("*.jsonl"))]
    return {str(f.relative_to(run)): f.read_bytes() for f in files}


def scalar_steps(run):
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    return [event.step for event in board.Scalars("rollouts/reward")]


@pytest.fixture(scope="module")
def undisturbed(overrides, tmp_path_factory):
    """The same run without SLURM, and without any signal."""
    logs = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "src/cli.py", "fit", *overrides, f"paths.log_dir={logs}", "seed=1"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [run] = logs.glob("*/*")
    return kept_files(run)


def held(step, folder):
    """Holds a run in this step; ``folder / "go"`` lets it go on."""
    own = "callbacks.hold"
    return [f"+{own}._target_=hold.Hold", f"+{own}.step={step}", f"+{own}.file={folder / 'go'}"]


def submit(slurm, overrides, folder, *options, seed=True):
    own = [*overrides, f"paths.log_dir={folder / 'logs'}", *(["seed=1"] if seed else [])]
    return slurm.submit(f"--output={folder}/%j.out", *options, SCRIPT, *own)


def test_g14_a_job_signalled_in_a_step_is_requeued_and_ends_as_if_nothing_had_happened(
    slurm, wait_until, overrides, undisturbed, tmp_path
):
    job = submit(slurm, [*overrides, *held(1, tmp_path)], tmp_path)
    # The step's rollouts are written before it is trained on.
    wait_for("logs/*/*/rollouts/step_000001.jsonl", tmp_path, wait_until, job, slurm)
    slurm("scancel", "--signal=USR1", job)
    wait_until(lambda: "stopping after this step" in log_of(tmp_path), "the signal")
    (tmp_path / "go").touch()
    assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
    [run] = tmp_path.glob("logs/*/*")
    assert run.name.startswith(f"job_{job}_")
    log = log_of(tmp_path)
    assert "SIGUSR1: stopping after this step." in log
    assert f"SLURM job {job} is requeued" in log
    assert log.count("Going on from") == 1
    assert kept_files(run) == undisturbed
    assert scalar_steps(run) == [0, 1, 2, 3]


def test_a_job_that_gives_way_to_another_one_is_requeued_and_goes_on(
    slurm, wait_until, overrides, undisturbed, tmp_path
):
    job = submit(slurm, [*overrides, *held(0, tmp_path)], tmp_path, "--cpus-per-task=4")
    wait_for("logs/*/*/rollouts/step_000000.jsonl", tmp_path, wait_until, job, slurm)
    urgent = slurm.submit(
        "--partition=high", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 1"
    )
    assert slurm.finish(urgent) == "COMPLETED"
    (tmp_path / "go").touch()
    assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
    [run] = tmp_path.glob("logs/*/*")
    assert "SIGTERM: stopping after this step." in log_of(tmp_path)
    assert "Going on from" in log_of(tmp_path)
    assert kept_files(run) == undisturbed


def test_a_cancelled_job_saves_and_does_not_come_back(slurm, wait_until, overrides, tmp_path):
    job = submit(slurm, [*overrides, "steps=40"], tmp_path)
    wait_for("logs/*/*/rollouts/step_000000.jsonl", tmp_path, wait_until, job, slurm)
    slurm("scancel", job)
    assert slurm.finish(job) == "CANCELLED"
    wait_until(lambda: "To go on: python src/cli.py fit" in log_of(tmp_path), "the hint", 60)
    [run] = tmp_path.glob("logs/*/*")
    assert list(run.glob("checkpoints/*.ckpt"))
    assert "requeued" not in log_of(tmp_path)


def test_g11_each_task_of_an_array_has_its_run_and_is_requeued_alone(
    slurm, wait_until, overrides, undisturbed, tmp_path
):
    array = submit(slurm, [*overrides, *held(1, tmp_path)], tmp_path, "--array=0-1", seed=False)
    # The last task's own job number is the array's.
    pattern = f"logs/*/job_{array}_1_*/rollouts/step_000001.jsonl"
    wait_for(pattern, tmp_path, wait_until, f"{array}_1", slurm)
    slurm("scancel", "--signal=USR1", f"{array}_1")
    wait_until(lambda: "stopping after this step" in log_of(tmp_path), "the signal")
    (tmp_path / "go").touch()
    states = [slurm.finish(f"{array}_{task}") for task in (0, 1)]
    assert states == ["COMPLETED", "COMPLETED"], log_of(tmp_path)
    first, second = sorted(tmp_path.glob("logs/*/*"))
    assert first.name.startswith(f"job_{array}_0_") and second.name.startswith(f"job_{array}_1_")
    log = log_of(tmp_path)
    assert log.count("is requeued") == 1 and f"SLURM job {array}_1 is requeued" in log
    assert kept_files(second) == undisturbed
    assert kept_files(first) != undisturbed


def test_a_multirun_starts_slurm_jobs_that_are_requeued_and_resumed_too(
    slurm, wait_until, overrides, undisturbed, tmp_path
):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    command = [sys.executable, "src/train.py", "-m", "launcher=slurm", *overrides]
    command += held(1, tmp_path)
    command += ["hydra.launcher.timeout_min=60", f"paths.log_dir={tmp_path / 'logs'}", "seed=0,1"]
    sweep = subprocess.Popen(
        command,
        cwd=ROOT,
        env=slurm.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def begun():
        assert sweep.poll() is None, sweep.stdout.read()
        return next(tmp_path.glob("logs/*/job_*_1_*/rollouts/step_000001.jsonl"), None)

    run = wait_until(begun, "the second job's second step", every=0.02).parents[1]
    job = "_".join(run.name.split("_")[1:3])
    # What submitit asks SLURM to send.
    slurm("scancel", "--signal=USR2", job)
    wait_until(lambda: "stopping after this step" in (run / "train.log").read_text(), "the signal")
    (tmp_path / "go").touch()
    output, _ = sweep.communicate(timeout=600)
    assert sweep.returncode == 0, output
    printed = "\n".join(path.read_text() for path in tmp_path.glob("logs/submitit/*/*.err"))
    assert f"SLURM job {job} is requeued" in printed + (run / "train.log").read_text()
    assert kept_files(run) == undisturbed
    assert len(list(tmp_path.glob("logs/*/job_*/policy"))) == 2
