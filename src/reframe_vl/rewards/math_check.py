"""Equality of mathematical expressions, by math-verify in a process of its own.

Works from any thread and never hangs: an item that passes its deadline, or that kills the worker
twice, *fails* (it is not equal, is logged and counted) and the worker is replaced. What keeps the
worker from starting at all is an infrastructure failure: it raises ``MathCheckError`` and is never
a score.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from reframe_vl.rewards.expression import clean_expression, is_text, units_clash

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("math_worker.py")
_DUMP_CHARS = 1_500
_SHOWN_CHARS = 80


class MathCheckError(RuntimeError):
    """The checker itself does not work: no score can be given."""


class _WorkerLostError(Exception):
    """The worker died while it worked on an item."""


class _DeadlineError(Exception):
    """An item took too long."""


class MathChecker:
    r"""One worker process, started when first needed; calls from several threads take turns.

    Attributes:
        checked: Items that went to the worker.
        failed: Those that passed the deadline or killed it.

    >>> with MathChecker() as checker:
    ...     checker.equal(r"\frac{1}{2}", "0.5"), checker.equal("x + y = 1", "x - y = 1")
    (True, False)
    """

    def __init__(
        self,
        deadline_s: float = 5.0,
        max_chars: int = 1_000,
        start_s: float = 120.0,
        command: tuple[str, ...] = (sys.executable, "-P", str(_WORKER)),
    ) -> None:
        """Sets the limits; starts nothing.

        Args:
            deadline_s: Seconds for one item.
            max_chars: Longer expressions are not equal to anything.
            start_s: Seconds that a worker may take to start.
            command: What to run as the worker.
        """
        self.deadline_s = deadline_s
        self.max_chars = max_chars
        self.start_s = start_s
        self.checked = 0
        self.failed = 0
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> MathChecker:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the worker."""
        self.close()

    def equal(self, reference: str, answer: str) -> bool:
        """Whether ``answer`` is mathematically equal to ``reference``.

        Equal text is equal; what is empty, too long, or not parsed on either side is not.

        Raises:
            MathCheckError: The worker cannot be started.
        """
        reference, answer = clean_expression(reference), clean_expression(answer)
        if not reference or not answer:
            return False
        if max(len(reference), len(answer)) > self.max_chars:
            logger.info("An expression of over %d characters is not compared.", self.max_chars)
            return False
        if reference == answer:
            return True
        if is_text(reference) or is_text(answer):
            return reference.casefold() == answer.casefold()
        return not units_clash(reference, answer) and self._compare(reference, answer)

    def close(self) -> None:
        """Ends the worker; the next item starts another."""
        with self._lock:
            self._stop()

    def _compare(self, reference: str, answer: str) -> bool:
        with self._lock:
            self.checked += 1
            for _ in range(2):
                try:
                    reply = self._ask(reference, answer)
                except _DeadlineError:
                    self._fail(reference, answer, f"took over {self.deadline_s:g} s")
                    return False
                except _WorkerLostError:
                    # Something else may have killed it: one more try on a fresh worker.
                    self._stop()
                    continue
                if reply["unparsed"] == "reference":
                    logger.warning("The reference %r is not a readable expression.", reference)
                return bool(reply["equal"])
            self._fail(reference, answer, "killed the worker twice")
            return False

    def _fail(self, reference: str, answer: str, what: str) -> None:
        self.failed += 1
        dump = self._stop()
        dump = dump[max(0, dump.rfind("Current thread")) :][:_DUMP_CHARS]
        shown = answer[:_SHOWN_CHARS], reference[:_SHOWN_CHARS]
        logger.warning("Comparing %r with %r %s; scored as failed.\n%s", *shown, what, dump)

    def _ask(self, reference: str, answer: str) -> dict[str, Any]:
        process = self._process or self._start()
        request = {"reference": reference, "answer": answer, "seconds": self.deadline_s}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            raise _WorkerLostError from error
        reply: dict[str, Any] = json.loads(self._read_line(process, self.deadline_s))
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._buffer = b""
        try:
            # A session of its own: Ctrl-C is for the parent, which may still want scores.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise MathCheckError(
                f"The math worker {self._command} cannot be run: {error}"
            ) from error
        try:
            ready = self._read_line(self._process, self.start_s)
        except _WorkerLostError as error:
            raise MathCheckError(
                "The math worker ended before it was ready; is math-verify installed?\n"
                + self._stop()[-_DUMP_CHARS:]
            ) from error
        except _DeadlineError as error:
            raise MathCheckError(
                f"The math worker was not ready within {self.start_s:g} s.\n" + self._stop()
            ) from error
        if ready != b"ready":
            raise MathCheckError(f"The math worker said {ready!r}, not 'ready'.\n" + self._stop())
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    self._dump_stack(process)
                    raise _DeadlineError
                chunk = os.read(process.stdout.fileno(), 65_536)
                if not chunk:
                    raise _WorkerLostError
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _dump_stack(self, process: subprocess.Popen[bytes]) -> None:
        assert self._stderr is not None
        written = os.fstat(self._stderr.fileno()).st_size
        process.send_signal(signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.01)
            if os.fstat(self._stderr.fileno()).st_size > written:
                return

    def _stop(self) -> str:
        """Ends the worker and returns the end of what it wrote to stderr."""
        if self._process is None or self._stderr is None:
            return ""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._stderr.seek(0)
        dump = self._stderr.read().decode(errors="replace")
        self._stderr.close()
        self._process = self._stderr = None
        return dump


class _Shared:
    """The checker that ``math_equal`` uses; a forked process must not talk to its parent's."""

    checker = MathChecker()

    @classmethod
    def renew(cls) -> None:
        cls.checker = MathChecker()


def math_equal(reference: str, answer: str) -> bool:
    """``MathChecker.equal`` by the one checker of this process, ended when the process ends.

    >>> math_equal("2x + 4y = 6", "x + 2y = 3"), math_equal("2^{-60}", "2^{-61}")
    (True, False)
    """
    return _Shared.checker.equal(reference, answer)


os.register_at_fork(after_in_child=_Shared.renew)
atexit.register(lambda: _Shared.checker.close())
