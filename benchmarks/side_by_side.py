"""Child processes side by side, which a Ctrl-C stops together and cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import common
from rich.console import Console

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Of a child: a second thread would take what the next child needs."""


class Stopped(Exception):
    """The script was told to stop before this was done."""


class ChildFailed(Exception):
    """A child process ended with an error."""


def _environment() -> dict[str, str]:
    """Of a child: the library is this tree's, whatever else is installed."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(common.ROOT / "src"), *filter(None, inherited)])
    return os.environ | ONE_THREAD | {"PYTHONPATH": path}


class Children:
    """The child processes of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._stopping = False

    def run(self, command: Sequence[str], log: Path) -> None:
        """Runs a command to its end; its output is added to ``log``.

        Raises:
            Stopped: It was stopped, or not started any more.
            ChildFailed: It failed by itself.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            with self._lock:
                if self._stopping:
                    raise Stopped
                child = subprocess.Popen(
                    command,
                    cwd=common.ROOT,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    # A Ctrl-C of the terminal would reach it twice: once from there, once from us.
                    start_new_session=True,
                )
                self._alive.add(child)
            code = child.wait()
        with self._lock:
            self._alive.discard(child)
            if code and self._stopping:
                raise Stopped
        if code:
            tail = log.read_text(errors="replace")[-1500:]
            raise ChildFailed(f"{' '.join(command)}\nended with {code}. {log} ends with:\n{tail}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signals those alive, and starts no more."""
        with self._lock:
            self._stopping = True
            for child in self._alive:
                child.send_signal(number)


def work_off(
    names: Sequence[str],
    work: Callable[[str, Children], None],
    jobs: int,
    minutes: float | None = None,
) -> bool:
    """Does the work of each name, several at a time; one that fails does not stop the others.

    Args:
        names: In the order in which they are begun.
        work: Called in a thread.
        jobs: How many at a time.
        minutes: After so many nothing more is begun.

    Returns:
        Whether nothing failed.

    Raises:
        SystemExit: The script was told to stop, and the children have stopped.
    """
    console, children = Console(stderr=True, highlight=False), Children()
    deadline = time.monotonic() + minutes * 60 if minutes is not None else None

    def one(name: str) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise Stopped
        console.print(f"{name}: begun")
        work(name, children)

    fine, done, start = True, 0, time.monotonic()
    with _terminate_as_interrupt(), ThreadPoolExecutor(jobs) as pool:
        futures: dict[Future[None], str] = {pool.submit(one, name): name for name in names}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, ChildFailed):
                    fine = False
                    console.print(f"{futures[future]}: FAILED\n{error}", markup=False)
                elif error is None:
                    done += 1
                    minute = (time.monotonic() - start) / 60
                    console.print(
                        f"{futures[future]}: done, {done}/{len(names)} in {minute:.0f} min"
                    )
                elif not isinstance(error, Stopped):
                    children.stop()
                    _cancel(futures)
                    raise error
        except KeyboardInterrupt:
            console.print("Stopping the runs after their step. Once more ends them at once.")
            children.stop()
            _cancel(futures)
            try:
                wait(futures)
            except KeyboardInterrupt:
                children.stop(signal.SIGKILL)
            raise SystemExit(130) from None
    return fine


def _cancel(futures: dict[Future[None], str]) -> None:
    for future in futures:
        future.cancel()


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM stops the script as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
