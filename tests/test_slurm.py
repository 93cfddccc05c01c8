"""What a process knows of the SLURM job that it is; tests/with_slurm has a real one."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reframe_vl import runs, slurm

ROOT = Path(__file__).parents[1]


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Sets a job's variables, and a scontrol that writes down what it is asked."""
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    asked = tmp_path / "asked"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()

    def make(said="", status=0, **variables):
        program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\necho "{said}"\nexit {status}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        return asked

    return make


def test_outside_of_a_batch_job_nothing_is_done(job):
    asked = job()
    assert slurm.job_name() is None and not slurm.restarted() and slurm.plugins() == []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        assert not slurm.asks_for_requeue(number)
    job(JOB_ID=7, JOB_NAME="bash", RESTART_COUNT=1)
    assert slurm.job_name() is None and not slurm.restarted()
    assert not asked.exists()


def test_g11_a_task_of_an_array_is_requeued_alone(job):
    # SLURM gives an array's last task the array's own number.
    asked = job(JOB_ID=40, ARRAY_JOB_ID=40, ARRAY_TASK_ID=3)
    assert slurm.requeue()
    assert asked.read_text() == "requeue 40_3\n"


def test_only_one_rank_requeues(job):
    asked = job(JOB_ID=7, PROCID=1)
    assert slurm.requeue()
    assert not asked.exists()


def test_a_job_that_cannot_be_requeued_says_why(job, caplog):
    job("", 1, JOB_ID=7)
    assert not slurm.requeue()
    assert "could not be requeued" in caplog.text


@pytest.mark.parametrize(
    ("shown", "again"),
    [("PreemptTime=None SuspendTime=None", False), ("PreemptTime=2026-01-01T00:00:00", True)],
)
def test_sigterm_brings_a_job_back_where_another_one_took_its_place(job, shown, again):
    job(shown, JOB_ID=7)
    assert slurm.asks_for_requeue(signal.SIGTERM) is again
    assert slurm.asks_for_requeue(signal.SIGUSR1) and slurm.asks_for_requeue(signal.SIGUSR2)
    assert not slurm.asks_for_requeue(signal.SIGINT)


def test_lightnings_own_handler_is_off(job):
    job(JOB_ID=7, NTASKS=1)
    [plugin] = slurm.plugins()
    assert not plugin.auto_requeue


def test_a_signal_between_steps_requeues_at_once_and_handlers_of_others_stay(job):
    asked = job(JOB_ID=7)
    # Whatever handlers the process of the tests has.
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    theirs = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    own = signal.getsignal(signal.SIGUSR2)
    try:
        with pytest.raises(SystemExit) as ended, slurm.requeued_on_signal():
            assert signal.getsignal(signal.SIGUSR2) is own
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ended.value.code == 128 + signal.SIGUSR1
        assert asked.read_text() == "requeue 7\n"
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, theirs)


@pytest.mark.parametrize(
    ("shown", "told"), [("PreemptTime=None", []), ("PreemptTime=2026-01-01", ["requeue 7"])]
)
def test_a_job_that_gives_way_between_steps_is_requeued_and_a_cancelled_one_is_not(
    job, shown, told
):
    asked = job(shown, JOB_ID=7)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, slurm.requeued_on_signal():
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
        assert asked.read_text().splitlines() == ["show job --oneliner 7", *told]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_rank_leaves_a_signal_between_steps_to_the_first_one(job):
    asked = job(JOB_ID=7, PROCID=1)
    signals = (signal.SIGUSR1, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_DFL) for number in signals]
    try:
        with slurm.requeued_on_signal():
            os.kill(os.getpid(), signal.SIGUSR1)
            # With which SLURM ends the job, as soon as the first one has requeued it.
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert not asked.exists()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def test_g14_a_job_signalled_while_it_loads_its_code_is_requeued(job, monkeypatch, tmp_path):
    asked = job(JOB_ID=7)
    lightning = tmp_path / "code" / "lightning" / "__init__.py"
    lightning.parent.mkdir(parents=True)
    lightning.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n")
    monkeypatch.setenv("PYTHONPATH", f"{lightning.parents[1]}:{ROOT / 'src'}")
    command = [sys.executable, str(ROOT / "src/cli.py"), "fit", f"paths.log_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    assert asked.read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["a.b='x y'", "c=[1, 2]"], ["seed=3", "a.b='x y'", "c=[1, 2]"]), (["seed=9"], ["seed=9"])],
)
def test_the_script_hands_arguments_over_as_they_are_and_a_seed_that_is_given_wins(
    job, monkeypatch, tmp_path, arguments, expected
):
    job(JOB_ID=7, ARRAY_TASK_ID=3)
    handed = tmp_path / "handed"
    srun = tmp_path / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {handed}\n')
    srun.chmod(0o755)
    subprocess.run(["bash", str(ROOT / "scripts/train.sbatch"), *arguments], check=True)
    assert handed.read_text().splitlines()[1:] == ["src/cli.py", "fit", *expected]


def test_a_jobs_run_is_named_after_it_and_a_restarted_job_finds_it(job, tmp_path):
    def directory(resume=None):
        return runs.run_directory(str(tmp_path), "exp", resume, None, ["seed=1"])

    job(JOB_ID=40, ARRAY_JOB_ID=40, ARRAY_TASK_ID=3)
    assert directory() == str(tmp_path / "exp" / "job_40_3_seed-1")
    assert runs.resume_of_job() is None
    job(RESTART_COUNT=1)
    assert runs.resume_of_job() == "job"
    # Not another run of the same settings, even where its own was never begun.
    other = tmp_path / "exp" / "other"
    other.mkdir(parents=True)
    (other / runs.IDENTITY).write_text('{"overrides": ["seed=1"]}')
    assert directory("job") == str(tmp_path / "exp" / "job_40_3_seed-1")
    assert directory("auto") == str(other)
