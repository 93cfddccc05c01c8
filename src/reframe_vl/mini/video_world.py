"""The mini video world: frames too coarse to read, and a selection that shows the answer.

A video has 10 frames, one a second. In some of them a coloured square with a digit fills the
frame; the others are blank. The first view shows all frames coarsely, 16×16 each, with so much
sensor noise that a colour is seen but a digit is not. A selected frame has 32×32 pixels, less
noise, and shows the digit.

Coarse frames also have a *cue*, as in the image world: a ring along the border whose hue names a
digit, the right one more often than chance. No selected frame shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from reframe_vl.data.evidence import applicability
from reframe_vl.mini.glyphs import COLOR_NAMES, NUM_DIGITS, digit_tile
from reframe_vl.mini.world import (
    check_cue_strength,
    draw_cue,
    draw_ring,
    region_weights,
    sample_rng,
    sense,
    view_side,
)
from reframe_vl.types import RGB, Answer, Evidence, Modality, Sample, VideoMedia

NUM_FRAMES = 10
FRAME_PX = 32
"""Side of a frame at full detail."""
COARSE_BUDGET = 256
"""Pixels of a frame on the first view: 16×16."""


@dataclass(frozen=True, slots=True)
class Event:
    """A coloured square with a digit that fills some frames.

    Attributes:
        segments: The frames it is seen in: runs of consecutive indices, in order, not adjacent.
    """

    color: str
    digit: int
    segments: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MiniVideo(VideoMedia):
    """A video that is drawn when it is looked at.

    Attributes:
        events: The first one is asked about.
        num_frames: Frames of the grid.
        background: Grey level.
        cue_digit: The digit that the hue of the coarse frames' ring names.
        noise_std: Of the sensor noise at full detail, on the scale where an image spans -1 to 1.
            It grows as the side of a view shrinks: a coarse look is a hasty one.
        noise_seed: With frame and size it decides the noise: looking twice shows the same pixels.
    """

    events: tuple[Event, ...]
    num_frames: int
    background: int
    cue_digit: int
    noise_std: float
    noise_seed: int

    @cached_property
    def key(self) -> str:
        """Names the content: equal keys, equal pixels."""
        return "mini-video-" + hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of a frame in pixels."""
        return (FRAME_PX, FRAME_PX)

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        """One frame a second, from 0 on."""
        return tuple(float(index) for index in range(self.num_frames))

    def event_at(self, frame: int) -> Event | None:
        """What a frame shows."""
        return next((e for e in self.events if any(frame in run for run in e.segments)), None)

    def canvas(self, frame: int) -> npt.NDArray[np.float32]:
        """Draws a frame without cue and noise, shape (32, 32, 3), values 0 to 255."""
        event = self.event_at(frame)
        if event is None:
            return np.full((FRAME_PX, FRAME_PX, 3), float(self.background), np.float32)
        return digit_tile(event.color, event.digit, FRAME_PX)

    def look(self, frames: Sequence[int], max_pixels: int = COARSE_BUDGET) -> list[RGB]:
        """Renders frames; those below full detail are noisier and show the cue.

        Args:
            frames: Indices on the grid.
            max_pixels: Budget of each; a frame has at most 32×32 pixels.

        Raises:
            ValueError: There is no such frame.
        """
        side = min(FRAME_PX, view_side(max_pixels))
        return [self._look(frame, side) for frame in frames]

    def _look(self, frame: int, side: int) -> RGB:
        if not 0 <= frame < self.num_frames:
            raise ValueError(f"There is no frame {frame}: they are 0 to {self.num_frames - 1}.")
        weights = region_weights(0.0, float(FRAME_PX), side)
        view = np.matmul(weights, np.tensordot(weights, self.canvas(frame), (1, 0)))
        if side < FRAME_PX:
            draw_ring(view, self.cue_digit)
        rng = np.random.default_rng([self.noise_seed, frame, side])
        return sense(view, self.noise_std * FRAME_PX / side, rng)


@dataclass(frozen=True)
class MiniVideoWorld:
    """A distribution of videos with a question about each.

    Scene and noise of a sample depend on the split, the index and the seed only; the parameters
    of the cue change nothing but the cue. So worlds with other cues are paired with this one.

    Attributes:
        n_events: Events of a video, each of another colour.
        n_segments: Runs of frames in which the event asked about is seen; the others have one.
        max_length: Most frames of a run; its length is drawn from 1 to this.
        cue_strength: Probability that the cue names the right digit for sure; otherwise it names
            a digit at random.
        conflict: The cue always names a wrong digit, whatever ``cue_strength``.
        noise_std: Of the sensor noise at full detail, on the scale where an image spans -1 to 1.
        num_frames: Frames of a video.
    """

    n_events: int = 3
    n_segments: int = 1
    max_length: int = 2
    cue_strength: float = 0.5
    conflict: bool = False
    noise_std: float = 0.8
    num_frames: int = NUM_FRAMES

    def __post_init__(self) -> None:
        if not 1 <= self.n_events <= len(COLOR_NAMES):
            raise ValueError(
                f"n_events is {self.n_events}, but each event needs a colour of its own: "
                f"set it from 1 to {len(COLOR_NAMES)}."
            )
        if self.n_segments < 1 or self.max_length < 1:
            raise ValueError(
                f"n_segments is {self.n_segments} and max_length {self.max_length}: set both to "
                "at least 1."
            )
        runs = self._num_runs
        needed = runs * self.max_length + runs - 1
        if needed > self.num_frames:
            raise ValueError(
                f"{runs} runs of up to {self.max_length} frames, a blank one between each two, "
                f"need {needed} frames, but num_frames is {self.num_frames}."
            )
        check_cue_strength(self.cue_strength)

    @property
    def _num_runs(self) -> int:
        return self.n_events - 1 + self.n_segments

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        """Draws a sample.

        Args:
            split: Any name; each is a stream of its own, disjoint from all others.
            index: Position in the stream.
            seed: Of the stream.
        """
        name = f"mini_video/{seed}/{split}/{index}"
        rng = sample_rng(name)
        colors = rng.permutation(len(COLOR_NAMES))[: self.n_events]
        digits = rng.integers(NUM_DIGITS, size=self.n_events)
        runs = self._draw_runs(rng)
        asked = tuple(sorted(runs[: self.n_segments]))
        segments = [asked, *((run,) for run in runs[self.n_segments :])]
        events = tuple(
            Event(COLOR_NAMES[color], int(digit), found)
            for color, digit, found in zip(colors, digits, segments, strict=True)
        )
        background = int(rng.integers(20, 60))
        noise_seed = int(rng.integers(1 << 62))
        target = events[0]
        video = MiniVideo(
            events=events,
            num_frames=self.num_frames,
            background=background,
            cue_digit=draw_cue(target.digit, self.cue_strength, self.conflict, rng),
            noise_std=self.noise_std,
            noise_seed=noise_seed,
        )
        # These segments are the *expanded* evidence already: nothing is to be added around them.
        evidence = Evidence(segments=target.segments)
        return Sample(
            id=name + ("/conflict" if self.conflict else ""),
            modality=Modality.VIDEO,
            media=video,
            question=f"What digit is on the {target.color} square?",
            answer=Answer(kind="number", value=str(target.digit)),
            evidence=evidence,
            applicability=applicability(len(evidence.frames) / self.num_frames),
            source="mini_video",
            split=split,
        )

    def _draw_runs(self, rng: np.random.Generator) -> list[tuple[int, ...]]:
        """Runs in random order, with at least one blank frame between any two."""
        lengths = rng.integers(1, self.max_length + 1, size=self._num_runs)
        free = self.num_frames - int(lengths.sum()) - (self._num_runs - 1)
        # Stars and bars: every way to spread the free frames is equally likely.
        bars = np.sort(rng.permutation(free + self._num_runs)[: self._num_runs])
        starts = bars + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        runs = [
            tuple(range(int(start), int(start + length)))
            for start, length in zip(starts, lengths, strict=True)
        ]
        return [runs[position] for position in rng.permutation(len(runs))]
