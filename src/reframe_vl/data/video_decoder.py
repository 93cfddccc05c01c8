"""Decodes videos in a process of its own, which can be ended when it hangs.

Works from any thread. Whatever a file does to the decoder, the caller gets frames or a
``MediaError``: a worker that passes its deadline or dies is replaced, and the file is tried once
more in the plainest way, frame by frame in one thread. A file that fails so twice is not tried
again. What keeps the worker from starting at all raises ``VideoWorkerError``.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import math
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from reframe_vl.data.decoded_frames import DecodedFrames
from reframe_vl.data.media import MediaError, unreadable
from reframe_vl.types import RGB

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("video_worker.py")
_HEADER = struct.Struct("<cIQ")
"""As ``HEADER`` of the worker, which is not imported: it would load FFmpeg here."""

_READY = b"ready"
_START_S = 120.0
_KILL_S = 10.0
_GRACE_S = 5
"""A worker whose parent is gone ends itself so much later than the parent would have ended it."""

_DUMP_CHARS = 1_500

_Frames: TypeAlias = npt.NDArray[np.uint8]
_Version: TypeAlias = tuple[Path, int, int]


class VideoWorkerError(RuntimeError):
    """The decoder itself does not work: no video can be read."""


class _WorkerLostError(Exception):
    """The worker died or passed its deadline; the message says which."""


class VideoDecoder:
    """One worker process, started when first needed; calls from several threads take turns."""

    def __init__(
        self,
        deadline_s: float = 180.0,
        store_bytes: int = 128 * 2**20,
        command: tuple[str, ...] = (sys.executable, "-P", str(_WORKER)),
    ) -> None:
        """Sets the limits; starts nothing.

        Args:
            deadline_s: Seconds for one frame, or for reading through a file once. Far above what
                either takes, also on a busy machine: which frames are read must not depend on it.
            store_bytes: Memory for frames that may be asked for again.
            command: What to run as the worker.
        """
        self.deadline_s = deadline_s
        self._command = command
        self._store = DecodedFrames(store_bytes)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._midway = False
        self._given_up: dict[_Version, str] = {}

    def __enter__(self) -> VideoDecoder:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the worker."""
        self.close()

    def size(self, path: Path) -> tuple[int, int]:
        """(width, height) of an upright frame; only the start of the file is read.

        Raises:
            MediaError: The file cannot be read.
        """
        width, height = self._call(path, {"what": "size"})["size"]
        return (width, height)

    def times(self, path: Path) -> tuple[list[float], float]:
        """When each frame is shown, ascending, and when the last one ends; in seconds.

        Raises:
            MediaError: The file cannot be read.
        """
        reply = self._call(path, {"what": "times"})
        return (reply["times_s"], reply["end_s"])

    def frames(self, path: Path, times_s: Sequence[float], size: tuple[int, int]) -> list[RGB]:
        """The frames that are shown from these times on, scaled to a size.

        Args:
            times_s: Some of ``times``.
            size: (width, height).

        Raises:
            MediaError: The file cannot be read, or has no such frames.
        """
        version = _version(path)
        found = {time_s: self._store.find((version, time_s, size)) for time_s in times_s}
        missing = [time_s for time_s, frame in found.items() if frame is None]
        if missing:
            decoded = np.empty((len(missing), size[1], size[0], 3), np.uint8)
            self._call(path, {"what": "frames", "times_s": missing, "size": size}, decoded)
            for time_s, pixels in zip(missing, decoded, strict=True):
                self._store.store((version, time_s, size), pixels)
                found[time_s] = pixels
        return [frame for time_s in times_s if (frame := found[time_s]) is not None]

    def close(self) -> None:
        """Ends the worker; the next call starts another."""
        with self._lock:
            self._stop()

    # ------------------------------------------------------------------ requests

    def _call(
        self, path: Path, request: dict[str, Any], frames: _Frames | None = None
    ) -> dict[str, Any]:
        version = _version(path)
        with self._lock:
            reply = self._reply(version, request, frames)
        if reply is None:
            raise MediaError(
                f"{path}: decoding the video {self._given_up[version]}, by seeking and frame by "
                "frame alike. Write it anew, as with `ffmpeg -i OLD NEW.mp4`, or leave its rows "
                "out."
            )
        if "error" in reply:
            raise MediaError(f"{path}: {reply['error']}")
        return reply

    def _reply(
        self, version: _Version, request: dict[str, Any], frames: _Frames | None
    ) -> dict[str, Any] | None:
        """The worker's answer; None where the file made it give none, now or before."""
        if version in self._given_up:
            return None
        for plain in (False, True):
            try:
                return self._ask({**request, "path": str(version[0]), "plain": plain}, frames)
            except _WorkerLostError as error:
                why = str(error)
            logger.warning("%s: decoding it %s.\n%s", version[0], why, self._stop())
        self._given_up[version] = why
        return None

    def _ask(self, request: dict[str, Any], frames: _Frames | None) -> dict[str, Any]:
        if self._midway:
            # An interrupt left the rest of an earlier reply in the pipe.
            self._stop()
        process = self._process or self._start()
        self._midway = True
        seconds = math.ceil(self.deadline_s) + _GRACE_S
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request | {"seconds": seconds}).encode() + b"\n")
        except BrokenPipeError as error:
            raise _WorkerLostError("ended the worker") from error
        empty = set(range(0 if frames is None else len(frames)))
        while True:
            end = time.monotonic() + self.deadline_s
            kind, position, length = _HEADER.unpack(self._read(bytearray(_HEADER.size), end))
            if kind == b"J":
                reply: dict[str, Any] = json.loads(self._read(bytearray(length), end))
                self._midway = False
                if empty and "error" not in reply:
                    # What was never filled holds whatever was in memory before.
                    raise _WorkerLostError(f"left out {len(empty)} of the frames")
                return reply
            assert frames is not None
            self._read(frames[position].reshape(-1).data, end)
            empty.discard(position)

    def _read(self, buffer: Any, end: float) -> Any:
        """Fills a buffer from the worker's replies and returns it."""
        assert self._process is not None and isinstance(self._process.stdout, io.FileIO)
        stdout, left = self._process.stdout, memoryview(buffer)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while left:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise _WorkerLostError(f"took over {self.deadline_s:g} s")
                count = stdout.readinto(left)
                if not count:
                    raise _WorkerLostError("ended the worker")
                left = left[count:]
        return buffer

    # ------------------------------------------------------------------ the process

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        try:
            # A new program, not a fork: no lock of a thread of this process can be held in it. In
            # a session of its own: Ctrl-C is for the parent, which may still want frames.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise VideoWorkerError(
                f"The video worker {self._command} cannot be run: {error}"
            ) from error
        try:
            self._read(bytearray(len(_READY)), time.monotonic() + _START_S)
        except _WorkerLostError as error:
            raise VideoWorkerError(
                f"The video worker was not ready within {_START_S:g} s, or ended before; is PyAV "
                f"(`pip install av`) installed?\n{self._stop()}"
            ) from error
        return self._process

    def _stop(self) -> str:
        """Ends the worker and returns the end of what it wrote to stderr."""
        if self._process is None or self._stderr is None:
            return ""
        self._process.kill()
        # A process that waits for a dead disk cannot be killed: it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._stderr.seek(0)
        dump = self._stderr.read().decode(errors="replace")
        self._stderr.close()
        self._process = self._stderr = None
        self._midway = False
        return dump[-_DUMP_CHARS:]


def _version(path: Path) -> _Version:
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise MediaError(unreadable(path, error)) from error
    return (path.absolute(), stat.st_mtime_ns, stat.st_size)


class _Shared:
    """The decoder that video files use; a forked process must not talk to its parent's worker."""

    decoder = VideoDecoder()

    @classmethod
    def renew(cls) -> None:
        cls.decoder = VideoDecoder()


def shared_decoder() -> VideoDecoder:
    """The one decoder of this process; its worker ends with the process."""
    return _Shared.decoder


os.register_at_fork(after_in_child=_Shared.renew)
atexit.register(lambda: _Shared.decoder.close())
