"""Interpreters that are started before they are asked for."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque

from reframe_vl.tools.sandbox import Interpreter
from reframe_vl.tools.sandbox_process import Limits, SandboxError, Wall, check_wall

_WATCH_S = 0.5


class SandboxPool:
    """Keeps a number of interpreters ready and hands each out once.

    It starts when it is first asked. All interpreters are started by one thread, which lives as
    long as the pool: they end with the thread that started them. The pool ends all of them, those
    handed out too, when it is closed or the program ends.
    """

    def __init__(self, warm: int = 2, limits: Limits | None = None, wall: Wall = "bubblewrap"):
        """Sets the pool up; starts nothing.

        Args:
            warm: Interpreters kept ready; more are started only for those who wait.
            limits: Of each interpreter.
            wall: What separates them from this process.

        Raises:
            SandboxError: They cannot be walled off so.
        """
        if warm < 0:
            raise ValueError(f"warm is {warm}: the pool cannot keep fewer than 0 interpreters.")
        check_wall(wall)
        self.limits = limits or Limits()
        self._warm = warm
        self._wall: Wall = wall
        self._changed = threading.Condition()
        self._idle: deque[Interpreter | SandboxError] = deque()
        self._live: set[Interpreter] = set()
        self._waiting = 0
        self._closed = False
        self._starter: threading.Thread | None = None
        self._owner = os.getpid()

    def __enter__(self) -> SandboxPool:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends all interpreters."""
        self.close()

    def take(self) -> Interpreter:
        """An interpreter that is ready and that nobody has used; give it to ``end`` afterwards.

        Raises:
            SandboxError: None can be started.
        """
        failures: list[SandboxError] = []
        # One may have died while it waited, as when memory ran short.
        while len(failures) < 2:
            interpreter = self._next()
            try:
                interpreter.wait()
            except SandboxError as error:
                failures.append(error)
                self.end(interpreter)
            else:
                return interpreter
        raise failures[-1]

    def end(self, interpreter: Interpreter) -> None:
        """Ends an interpreter that was taken."""
        interpreter.close()
        with self._changed:
            self._live.discard(interpreter)

    def close(self) -> None:
        """Ends all interpreters, also those that are in use."""
        if os.getpid() != self._owner:
            # A fork: the interpreters are its parent's.
            return
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._starter is not None:
            self._starter.join()

    def _next(self) -> Interpreter:
        with self._changed:
            if self._closed or os.getpid() != self._owner:
                raise SandboxError(
                    "The pool of interpreters is closed, or belongs to the process that this one "
                    "was forked from: make a new one."
                )
            if self._starter is None:
                atexit.register(self.close)
                self._starter = threading.Thread(target=self._work, name="sandbox", daemon=True)
                self._starter.start()
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._closed)
            self._waiting -= 1
            if self._closed:
                raise SandboxError("The pool of interpreters was closed.")
            found = self._idle.popleft()
            self._changed.notify_all()
        if isinstance(found, SandboxError):
            raise found
        return found

    def _work(self) -> None:
        """Starts interpreters until the pool is closed, and then ends all.

        It is this thread that ends them, so that they do not end with it: then nobody would wait
        for what they leave.
        """
        while not self._closed:
            if not self._wanted():
                for interpreter in self._live.copy():
                    interpreter.watch()
                continue
            started: Interpreter | SandboxError
            try:
                started = Interpreter(self.limits, self._wall)
            except SandboxError as error:
                started = error
            with self._changed:
                if isinstance(started, Interpreter):
                    self._live.add(started)
                self._idle.append(started)
                self._changed.notify_all()
        with self._changed:
            live, self._live = self._live, set()
            self._idle.clear()
        for interpreter in live:
            interpreter.kill()
        for interpreter in live:
            interpreter.close()

    def _wanted(self) -> bool:
        """Waits until one more interpreter is wanted, the pool is closed, or it is time to look."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or len(self._idle) < self._warm + self._waiting,
                _WATCH_S if self._live else None,
            )
            return not self._closed and len(self._idle) < self._warm + self._waiting
