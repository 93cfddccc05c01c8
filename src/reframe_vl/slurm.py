"""A run as a SLURM batch job: what it is called, and how it is put back into the queue.

SLURM sends a signal before a job's time is over (``sbatch --signal=USR1@120``) and when another job
takes its place. A handler only notes it; what it asks for is done after the step, here.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

BEFORE_THE_END = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are sent before a job's time is over: by our sbatch script, and by submitit."""

_INTERACTIVE = ("bash", "interactive")
"""Names of jobs that are a person's shell; as Lightning has it."""


def job_name() -> str | None:
    """The batch job this is: ``JOB``, or ``ARRAY_TASK`` of an array; None outside of one.

    An array's last task has the array's own number as its job: ``scontrol requeue`` would take it
    for all of them.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or os.environ.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else job


def restarted() -> bool:
    """Whether SLURM has started this batch job before."""
    return job_name() is not None and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def plugins() -> list[Any]:
    """Lightning's plugin for SLURM without its own handler, which saves while a step is running."""
    if job_name() is None or "SLURM_NTASKS" not in os.environ:
        return []
    # Loading it takes seconds, and run directories are named here too.
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    return [SLURMEnvironment(auto_requeue=False)]


def asks_for_requeue(received: signal.Signals) -> bool:
    """Whether a job that got this signal should be started again.

    SIGTERM is sent to a job that is cancelled too; SLURM knows which of them gives way to another.
    """
    if job_name() is None:
        return False
    return received in BEFORE_THE_END or (received == signal.SIGTERM and _gives_way())


def requeue() -> bool:
    """Puts this batch job back into the queue; SLURM then ends what is left of it.

    Returns:
        Whether it will be started again.
    """
    if not _is_first_rank():
        return True
    name = job_name()
    try:
        _scontrol("requeue", str(name))
    except (OSError, subprocess.SubprocessError) as error:
        logger.error("SLURM job %s could not be requeued: %s", name, _words(error))
        return False
    logger.warning("SLURM job %s is requeued, and goes on with this run when it is started.", name)
    return True


@contextmanager
def requeued_on_signal() -> Iterator[None]:
    """Requeues a batch job that is to end while no step is running: nothing is to be saved then.

    Only where nobody else handles these signals: submitit does, in the jobs that it starts.
    """
    signals = (*BEFORE_THE_END, signal.SIGTERM) if job_name() else ()
    taken = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _requeue_or_end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _requeue_or_end(number: int, frame: FrameType | None) -> None:
    if not _is_first_rank():
        # The first one decides. It may be waiting for this one, and hear of the signal only then; a
        # SIGTERM after that is SLURM's, which ends the job.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    if asks_for_requeue(signal.Signals(number)):
        requeue()
    raise SystemExit(128 + number)


def _is_first_rank() -> bool:
    return int(os.environ.get("SLURM_PROCID", "0")) == 0


def _gives_way() -> bool:
    """Whether SLURM takes the job's place for another one, which it then does not requeue."""
    try:
        shown = _scontrol("show", "job", "--oneliner", os.environ["SLURM_JOB_ID"])
    except (OSError, subprocess.SubprocessError) as error:
        logger.error("SLURM does not say why the job is to end: %s", _words(error))
        return False
    return "PreemptTime=" in shown and "PreemptTime=None" not in shown


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def _words(error: Exception) -> str:
    """What ``scontrol`` says, or why it could not be asked."""
    said = getattr(error, "stderr", None)
    return str(said).strip() if said else str(error)
