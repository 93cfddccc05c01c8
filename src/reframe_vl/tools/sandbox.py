"""A Python interpreter for code that nobody has read.

It lives in a process of its own (``sandbox_process``) and keeps its variables from call to call. A
call ends by its deadline at the latest, here, whatever its code does. What comes back is taken for
plain data of an unknown source and checked: text, numbers, and raw pixels of stated sizes. The code
may forge messages, but only its own.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from reframe_vl.tools.sandbox_process import Limits, SandboxError, SandboxProcess, Wall
from reframe_vl.types import RGB

_HEADER = struct.Struct("<II")
"""As ``HEADER`` of the worker, which is not imported: it is a program."""

_START_S = 120.0
_WATCH_S = 0.25
_CHUNK = 65_536
_MAX_NOTE_CHARS = 500
"""What the worker may add to an output of the greatest length."""

_FORGED = "wrote into the interpreter's own channel"


class InterpreterLostError(Exception):
    """The interpreter is gone, by its code's fault; the message completes "The code ..."."""


@dataclass(frozen=True)
class Execution:
    """What came of a call.

    Attributes:
        text: What the code printed, the value of its last expression, or a traceback.
        images: What it showed.
        failed: It raised, or did not come to its end.
    """

    text: str
    images: tuple[RGB, ...] = ()
    failed: bool = False


FetchFrames: TypeAlias = Callable[[Any], tuple[dict[str, Any], bytes]]
"""Answers a request for frames, which may be anything, with sizes and pixels or an error."""


class Interpreter:
    """One interpreter; calls of several threads take turns."""

    def __init__(self, limits: Limits, wall: Wall = "bubblewrap") -> None:
        """Starts the process, which ends with this thread, and does not wait for it.

        Raises:
            SandboxError: It cannot be started.
        """
        self.limits = limits
        self._process = SandboxProcess(limits, wall)
        self._lock = threading.Lock()
        self._closed = False
        # Not before it is ready: until then its files may be those outside.
        self._watch_at = math.inf

    def wait(self) -> None:
        """Waits until the interpreter is ready; once, before anything else.

        Raises:
            SandboxError: It ended, or takes too long.
        """
        with self._lock:
            try:
                self._receive(time.monotonic() + _START_S, 0)
            except InterpreterLostError as error:
                raise SandboxError(_start_failure(self._stop())) from error
            if self._process.ended:
                raise SandboxError("The interpreter ended while it waited to be used. Try again.")
            self._watch_at = 0.0

    def give(self, message: dict[str, Any], blob: bytes = b"") -> None:
        """Gives it media, before the first call.

        Raises:
            InterpreterLostError: It does not take them.
        """
        with self._lock:
            end = time.monotonic() + self.limits.call_s
            self._send({"do": "media", **message}, blob, end)

    def run(self, code: str, max_pixels: int, fetch: FetchFrames) -> Execution:
        """Runs a call.

        Args:
            max_pixels: Of each image that comes back.
            fetch: Called in this thread; what it raises leaves the interpreter unusable.

        Raises:
            InterpreterLostError: The code's fault. The process may still run: close it.
        """
        limits = self.limits
        request = {"do": "run", "code": code, "max_pixels": max_pixels}
        request |= {"max_images": limits.max_images, "max_chars": limits.max_output_chars}
        with self._lock:
            end = time.monotonic() + limits.call_s
            self._send(request, b"", end)
            while True:
                message, blob = self._receive(end, 3 * max_pixels * limits.max_images)
                if "frames" not in message:
                    return self._checked(message, blob, max_pixels)
                began = time.monotonic()
                reply, pixels = fetch(message["frames"])
                end += time.monotonic() - began
                self._send(reply, pixels, end)

    def watch(self) -> None:
        """Ends the process where it makes too many files though no call runs.

        Code that has forged its result goes on after the call. While a call runs, it looks itself.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._watch_at < math.inf and self._process.num_files > self.limits.max_files:
                self.kill()
        finally:
            self._lock.release()

    def kill(self) -> None:
        """Ends the process from any thread and at any time, also while a call runs."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and waits until nothing of it is left."""
        self.kill()
        with self._lock:
            self._stop()

    # ------------------------------------------------------------------ messages

    def _send(self, message: dict[str, Any], blob: bytes, end: float) -> None:
        pipe = self._process.requests
        text = json.dumps(message).encode()
        for part in (_HEADER.pack(len(text), len(blob)) + text, blob):
            left = memoryview(part)
            while left:
                self._await(pipe, selectors.EVENT_WRITE, end)
                try:
                    left = left[os.write(pipe, left[:_CHUNK]) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError as error:
                    raise InterpreterLostError("ended the interpreter") from error

    def _receive(self, end: float, max_blob_bytes: int) -> tuple[dict[str, Any], bytes]:
        text_bytes, blob_bytes = _HEADER.unpack(self._read(_HEADER.size, end))
        # A character may take six bytes as JSON.
        if text_bytes > 12 * self.limits.max_output_chars + _CHUNK or blob_bytes > max_blob_bytes:
            raise InterpreterLostError(_FORGED)
        text, blob = self._read(text_bytes, end), self._read(blob_bytes, end)
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InterpreterLostError(_FORGED) from error
        if not isinstance(message, dict):
            raise InterpreterLostError(_FORGED)
        return message, blob

    def _read(self, count: int, end: float) -> bytes:
        pipe = self._process.replies
        data = bytearray()
        while len(data) < count:
            self._await(pipe, selectors.EVENT_READ, end)
            chunk = os.read(pipe, min(count - len(data), 16 * _CHUNK))
            if not chunk:
                raise InterpreterLostError("ended the interpreter")
            data += chunk
        return bytes(data)

    def _await(self, pipe: int, event: int, end: float) -> None:
        """Waits for a pipe, and meanwhile watches what no limit of the kernel bounds."""
        if self._closed:
            raise InterpreterLostError("was stopped, because the sandbox was closed")
        # It takes no descriptor, of which many interpreters may leave none.
        with selectors.PollSelector() as selector:
            selector.register(pipe, event)
            # Looked at first: code may keep the pipe busy for ever.
            while (now := time.monotonic()) < end:
                if now >= self._watch_at:
                    self._watch_at = now + _WATCH_S
                    if self._process.num_files > self.limits.max_files:
                        raise InterpreterLostError(f"made over {self.limits.max_files} files")
                if selector.select(min(end - now, _WATCH_S)):
                    return
        raise InterpreterLostError(f"took over {self.limits.call_s:g} s and was stopped")

    def _checked(self, message: dict[str, Any], blob: bytes, max_pixels: int) -> Execution:
        text, sizes = message.get("text"), message.get("images")
        if not isinstance(text, str) or not isinstance(sizes, list):
            raise InterpreterLostError(_FORGED)
        images, start = [], 0
        for size in sizes[: self.limits.max_images + 1]:
            if not (isinstance(size, list) and [type(side) for side in size] == [int, int]):
                raise InterpreterLostError(_FORGED)
            width, height = size
            end = start + 3 * width * height
            if min(width, height) < 1 or width * height > max_pixels or end > len(blob):
                raise InterpreterLostError(_FORGED)
            pixels = np.frombuffer(blob[start:end], np.uint8).reshape(height, width, 3)
            images.append(pixels.copy())
            start = end
        if start != len(blob) or len(images) > self.limits.max_images:
            raise InterpreterLostError(_FORGED)
        # A little more than the limit: the worker's own notes.
        whole = (
            text[: self.limits.max_output_chars + _MAX_NOTE_CHARS].encode(errors="replace").decode()
        )
        return Execution(whole, tuple(images), bool(message.get("failed")))

    def _stop(self) -> str:
        if self._closed:
            return ""
        self._closed = True
        return self._process.stop()


def _start_failure(stderr: str) -> str:
    return (
        f"The sandboxed interpreter was not ready within {_START_S:g} s, or ended before. Where "
        "bubblewrap says that it has no permission, user namespaces are switched off: set "
        "`sysctl kernel.unprivileged_userns_clone=1` or, on Ubuntu, "
        "`kernel.apparmor_restrict_unprivileged_userns=0`, or let the container make them; where "
        f"it does not know an option, install version 0.8 or later.\n{stderr}"
    )
