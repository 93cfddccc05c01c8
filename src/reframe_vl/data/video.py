"""Videos read from files, on the one grid of frames that a sample has.

Frames are upright 8-bit RGB, named by the time at which they are shown. Of a file with several
video streams the first is read, cover pictures aside. Decoding happens in another process
(``video_decoder``).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from reframe_vl.data.media import file_key, reduced_size
from reframe_vl.data.video_decoder import shared_decoder
from reframe_vl.types import RGB, VideoMedia


@dataclass(frozen=True)
class GridRule:
    """Which frames of a video a sample has; the values are ours.

    The time from the first frame to the end of the last is divided into equal parts: ``fps`` a
    second, at least one, at most ``max_frames``. The frame shown in the middle of each part is
    taken, once: a video has no more frames on its grid than in its file.
    """

    fps: float = 2.0
    max_frames: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.fps < float("inf"):
            raise ValueError(f"fps is {self.fps}: give frames a second, above 0.")
        if self.max_frames < 1:
            raise ValueError(f"max_frames is {self.max_frames}: a grid has at least 1 frame.")

    def choose(self, times_s: Sequence[float], end_s: float) -> tuple[int, ...]:
        """The numbers of the chosen frames, ascending.

        Args:
            times_s: When each frame is shown, ascending; need not be evenly spaced.
            end_s: When the last one ends.
        """
        duration_s = end_s - times_s[0]
        parts = min(self.max_frames, max(1, round(duration_s * self.fps)))
        middles = (times_s[0] + duration_s * (part + 0.5) / parts for part in range(parts))
        return tuple(sorted({bisect_right(times_s, middle) - 1 for middle in middles}))


@dataclass(frozen=True)
class VideoFacts:
    """What is known of a video without looking at it.

    Attributes:
        size: (width, height) of an upright frame.
        duration_s: When the last frame ends, in seconds since the start of the file.
        n_frames: Frames that the file really has, whatever its header says.
        timestamps_s: Of the grid.
    """

    size: tuple[int, int]
    duration_s: float
    n_frames: int
    timestamps_s: tuple[float, ...]


def read_facts(path: Path, rule: GridRule) -> VideoFacts:
    """Reads through a video file, decoding its first frame only, and lays the grid.

    Raises:
        MediaError: The file cannot be read.
    """
    times_s, end_s = shared_decoder().times(path)
    return VideoFacts(
        size=shared_decoder().size(path),
        duration_s=end_s,
        n_frames=len(times_s),
        timestamps_s=tuple(times_s[number] for number in rule.choose(times_s, end_s)),
    )


@dataclass(frozen=True)
class VideoFile(VideoMedia):
    """A video in a file, on its grid of frames.

    The file must not change while a ``VideoFile`` of it is in use.

    Attributes:
        rule: Lays the grid.
        known: What a record says of the file. With it nothing is read before the first look, and
            a look at a file with other frame times fails.
    """

    path: Path
    rule: GridRule = GridRule()
    known: VideoFacts | None = None

    @property
    def facts(self) -> VideoFacts:
        """What is known of the video.

        Raises:
            MediaError: It has to be read, and cannot be.
        """
        return self.known or self._read

    @cached_property
    def _read(self) -> VideoFacts:
        return read_facts(self.path, self.rule)

    @cached_property
    def key(self) -> str:
        """The start of the SHA-256 of the file's bytes, and of its grid's."""
        grid = hashlib.sha256(repr(self.timestamps_s).encode())
        return f"{file_key(self.path)}-{grid.hexdigest()[:8]}"

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of an upright frame in pixels."""
        return self.facts.size

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        """The time of each frame of the grid, in seconds since the start of the file."""
        return self.facts.timestamps_s

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        """Returns frames of the grid, each reduced to at most ``max_pixels``, never enlarged.

        Raises:
            MediaError: The file cannot be read, or is not the one that is known.
            IndexError: The grid has no such frame.
        """
        count = len(self.timestamps_s)
        outside = [number for number in frames if not 0 <= number < count]
        if outside:
            raise IndexError(f"{self.path}: there is no frame {outside[0]} on a grid of {count}.")
        wanted = sorted(set(frames))
        pixels = shared_decoder().frames(
            self.path,
            [self.timestamps_s[number] for number in wanted],
            reduced_size(self.size, max_pixels),
        )
        found = dict(zip(wanted, pixels, strict=True))
        return [found[number] for number in frames]
