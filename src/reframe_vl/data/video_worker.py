"""The process in which videos are decoded; ``video_decoder`` starts, bounds and ends it.

It is run as a file, so that it loads neither this package nor its parent's main module. It says
``ready``; then a request is one line of JSON, ``{"what", "path", "plain", "seconds"}`` and for
frames ``{"times_s", "size"}``, and a reply is a run of messages, each a header (``HEADER``: kind,
position, length) and so many bytes: any number of frames (F, raw 8-bit RGB), then one JSON object
(J), with ``error`` where the request failed. A file is open only while a request for it is served,
and one frame is held at a time, so that memory does not grow with the length of a video.

Frames are found by their presentation times, never by counting: a seek may land anywhere, and an
edit list hides frames that are decoded all the same.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

import av
import numpy as np
import numpy.typing as npt

HEADER = struct.Struct("<cIQ")
_MAX_MEMORY = 8 << 30
_MAX_INDEXES = 32
_FURTHER_BACK = 4
_SAME_TIME_S = 1e-3
"""Two versions of FFmpeg may round a time differently by less than this; of the frames that are so
close, the nearest is meant."""

_OTHER_FILE = (
    "it is not the file that the record was made from. Fetch that one, or make the record again."
)
_REMEDY = "it may be damaged or of an unknown format. Fetch it again, or leave its rows out."
_ERRORS = (av.error.FFmpegError, OSError, ValueError, MemoryError)


class _UnreadableError(Exception):
    """What is asked for cannot be read; the message says why, and the remedy."""


@dataclass(frozen=True)
class _Index:
    """The frames of a video in the order in which they are shown.

    Attributes:
        pts: Presentation times, in units of the stream's time base.
        keys: Those at which decoding can start.
        times_s: The same times in seconds since the start of the file.
        end_s: When the last frame ends.
    """

    pts: array[int]
    keys: array[int]
    times_s: npt.NDArray[np.float64]
    end_s: float

    def pts_at(self, times_s: list[float]) -> list[int]:
        """The frames that are shown from these times on, one each."""
        found: dict[int, float] = {}
        for time_s in times_s:
            after = bisect_left(self.times_s, time_s)
            around = range(max(after - 1, 0), min(after + 1, len(self.pts)))
            nearest = min(around, key=lambda number: abs(self.times_s[number] - time_s))
            if abs(self.times_s[nearest] - time_s) > _SAME_TIME_S:
                raise _UnreadableError(
                    f"no frame of the video is shown from {time_s:.6f} s on: {_OTHER_FILE}"
                )
            pts = self.pts[nearest]
            if pts in found:
                raise _UnreadableError(
                    f"one frame of the video is shown from {found[pts]:.6f} s and from "
                    f"{time_s:.6f} s on: {_OTHER_FILE}"
                )
            found[pts] = time_s
        return list(found)

    def key_before(self, pts: int, back: int) -> int:
        """Where to start decoding for a frame: at its key frame, or so many further back."""
        return self.keys[max(bisect_right(self.keys, pts) - 1 - back, 0)]


_indexes: OrderedDict[tuple[str, int, int], _Index] = OrderedDict()


# --------------------------------------------------------------------------- reading


@contextmanager
def _opened(path: str, threads: int) -> Iterator[tuple[Any, Any]]:
    """A file and its first video stream; the other streams are not read."""
    # Said to be a file, so that a name that looks like an address is not fetched.
    with av.open(f"file:{path}", metadata_errors="ignore") as container:
        covers = av.stream.Disposition.attached_pic
        videos = [s for s in container.streams.video if not s.disposition & covers]
        if not videos or videos[0].codec_context is None:
            raise _UnreadableError(
                "the file has no video stream of a known format. Leave its rows out."
            )
        for stream in container.streams:
            if stream is not videos[0]:
                stream.discard = av.stream.Discard.all
        videos[0].codec_context.thread_type = "AUTO"
        videos[0].codec_context.thread_count = threads
        yield container, videos[0]


def _index(path: str) -> _Index:
    stat = os.stat(path)
    version = (path, stat.st_mtime_ns, stat.st_size)
    if version not in _indexes:
        _indexes[version] = _read_index(path)
        if len(_indexes) > _MAX_INDEXES:
            _indexes.popitem(last=False)
    _indexes.move_to_end(version)
    return _indexes[version]


def _read_index(path: str) -> _Index:
    durations: dict[int, int] = {}
    keys = set()
    with _opened(path, 1) as (container, stream):
        reordered = container.format.name == "avi" and stream.codec_context.has_b_frames
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            if packet.pts is None or reordered:
                raise _UnreadableError(
                    "the video does not hold the times of its frames. Write it anew, as with "
                    "`ffmpeg -i OLD NEW.mp4`."
                )
            if packet.is_keyframe:
                keys.add(packet.pts)
            # An edit list hides what was cut away in front but is needed to decode the rest.
            if not packet.is_discard:
                durations[packet.pts] = packet.duration or 0
        if not durations:
            raise _UnreadableError(f"the video has no frames: {_REMEDY}")
        pts = np.array(sorted(durations), np.int64)
        unit = stream.time_base
        start_s = (container.start_time or 0) / av.time_base
        rate = stream.average_rate
    last = durations[int(pts[-1])] * float(unit)
    if last <= 0:
        gap_s = float(pts[-1] - pts[0]) * float(unit) / max(len(pts) - 1, 1)
        last = gap_s or (1 / float(rate) if rate else 1.0)
    times_s = pts * unit.numerator / unit.denominator - start_s
    return _Index(
        array("q", pts.tolist()),
        array("q", sorted(keys) or [int(pts[0])]),
        times_s,
        float(times_s[-1]) + last,
    )


def _decoded(container: Any, stream: Any, left: set[int], skip: bool) -> Iterator[Any]:
    """Decodes on from where the file stands and takes the wanted frames out of ``left``."""
    context, last = stream.codec_context, max(left)
    for packet in container.demux(stream):
        if skip:
            # In H.264 no other frame depends on these, so they cost nothing but when wanted.
            context.skip_frame = "DEFAULT" if packet.pts in left else "NONREF"
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            continue
        for frame in frames:
            if frame.pts in left and not frame.is_corrupt:
                left.remove(frame.pts)
                yield frame
            elif frame.pts is not None and frame.pts > last:
                return
        if not left:
            return


def _frames(path: str, index: _Index, wanted: list[int], plain: bool) -> Iterator[Any]:
    """Yields the wanted frames, in the order in which they are found.

    Args:
        plain: By decoding one by one from the start, in one thread, without seeking.
    """
    left = set(wanted)
    # A seek may land late, and what follows a key frame may lean on frames before it.
    for back in (len(index.keys),) if plain else (0, _FURTHER_BACK):
        with _opened(path, 1 if plain else 0) as (container, stream):
            skip = back == 0 and stream.codec_context.name == "h264"
            starts = [index.key_before(pts, back) for pts in sorted(left)]
            for key, group in groupby(zip(starts, sorted(left), strict=True), itemgetter(0)):
                # The file stands at its start, where not every format can seek back to.
                if key != index.keys[0]:
                    container.seek(key, stream=stream)
                for frame in _decoded(container, stream, {pts for _, pts in group}, skip):
                    left.remove(frame.pts)
                    yield frame
        if not left:
            return
    raise _UnreadableError(
        f"{len(left)} of the {len(wanted)} frames asked for cannot be decoded: {_REMEDY}"
    )


# --------------------------------------------------------------------------- upright


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    """(x from x, y from x, x from y, y from y) of the frame's display matrix, as signs."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return (1, 0, 0, 1)
    values = np.frombuffer(data, np.int32)[[0, 1, 3, 4]]
    a, b, c, d = (int(x) for x in np.rint(values / max(1, np.abs(values).max())))
    # Anything but quarter turns and mirrors would leave empty corners: it is not applied.
    right_angled = (a and d and not b and not c) or (b and c and not a and not d)
    return (a, b, c, d) if right_angled else (1, 0, 0, 1)


def _upright(frame: Any, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """The frame in 8-bit RGB, scaled to a (width, height) that it has once it is upright."""
    x_to_x, x_to_y, y_to_x, y_to_y = _matrix(frame)
    turned = not x_to_x
    width, height = size[::-1] if turned else size
    pixels = frame.reformat(
        width=width, height=height, format="rgb24", interpolation="BICUBIC"
    ).to_ndarray()
    if turned:
        pixels = pixels.transpose(1, 0, 2)
    if min(x_to_y, y_to_y) < 0:
        pixels = pixels[::-1]
    if min(x_to_x, y_to_x) < 0:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


# --------------------------------------------------------------------------- requests


def _size(path: str) -> tuple[int, int]:
    """(width, height) of the first frame that can be decoded, upright."""
    with _opened(path, 1) as (container, stream):
        for packet in container.demux(stream):
            try:
                frame = next(iter(packet.decode()), None)
            except av.error.InvalidDataError:
                continue
            if frame is not None:
                turned = not _matrix(frame)[0]
                return (frame.height, frame.width) if turned else (frame.width, frame.height)
    raise _UnreadableError(f"no frame of the video can be decoded: {_REMEDY}")


def _answer(request: dict[str, Any], replies: IO[bytes]) -> dict[str, Any]:
    path, plain = request["path"], request["plain"]
    if request["what"] == "size":
        return {"size": _size(path)}
    index = _index(path)
    if request["what"] == "times":
        return {"times_s": index.times_s.tolist(), "end_s": index.end_s}
    position = {pts: number for number, pts in enumerate(index.pts_at(request["times_s"]))}
    for frame in _frames(path, index, sorted(position), plain):
        pixels = _upright(frame, tuple(request["size"]))
        replies.write(HEADER.pack(b"F", position[frame.pts], pixels.nbytes))
        replies.write(pixels.data)
        replies.flush()
        signal.alarm(request["seconds"])
    return {}


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answers requests until the input closes."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Whatever a library prints must not mix with the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    replies.write(b"ready")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        # Should the parent be gone, nobody else ends code that hangs and holds all threads up.
        signal.alarm(request["seconds"])
        try:
            last = _answer(request, replies)
        except _UnreadableError as error:
            last = {"error": str(error)}
        except _ERRORS as error:
            last = {"error": f"the video cannot be read ({type(error).__name__}): {_REMEDY}"}
        signal.alarm(0)
        text = json.dumps(last).encode()
        replies.write(HEADER.pack(b"J", 0, len(text)) + text)
        replies.flush()


if __name__ == "__main__":
    main()
