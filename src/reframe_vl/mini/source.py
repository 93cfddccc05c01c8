"""The mini worlds as sources of numbered samples, and the data of their experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from reframe_vl.data.datamodule import SampleDataModule, SampleSource, check_evaluation_size
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.world import MiniWorld
from reframe_vl.types import Sample

TRAIN_SIZE = 100_000


@runtime_checkable
class World(Protocol):
    """A distribution of samples."""

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        """Draws a sample; it depends on these arguments only."""


class WorldSource:
    """Samples of a world's split; the split and the seed decide what they are.

    Args:
        world: The world and its difficulty.
        split: Splits share no sample.
        size: Samples before they repeat.
        seed: Another seed, other samples.
    """

    def __init__(self, world: World, split: str, size: int, seed: int = 0) -> None:
        """Nothing is rendered before it is looked at."""
        self.world, self.split, self.size, self.seed = world, split, size, seed

    def __len__(self) -> int:
        """Samples."""
        return self.size

    def __getitem__(self, index: int) -> Sample:
        """One sample."""
        if not 0 <= index < self.size:
            raise IndexError(f"Sample {index} of a split of {self.size}.")
        return self.world.sample(self.split, index, self.seed)


class AlternatingSource:
    """Samples of several sources of one size in turn: the first of each, then the second."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        """Takes the sources over."""
        self.sources = sources
        self._size = sum(map(len, sources))

    def __len__(self) -> int:
        """Samples of all sources."""
        return self._size

    def __getitem__(self, index: int) -> Sample:
        """One sample."""
        position, turn = divmod(index, len(self.sources))
        return self.sources[turn][position]


def mini_image_data(
    shortcut: float, n_objects: int, noise: float, evaluation_size: int, seed: int
) -> SampleDataModule:
    """Training scenes, test scenes, and the test scenes with a cue that is always wrong.

    Args:
        shortcut: How often the cue is right by design.
        n_objects: Squares on the canvas.
        noise: Standard deviation of the sensor noise.
        evaluation_size: Test scenes; they are the same for every seed.
        seed: Of the training scenes.

    Raises:
        ValueError: ``evaluation_size`` is no whole number of at least 1.
    """
    worlds = [
        MiniWorld(n_objects=n_objects, cue_strength=shortcut, noise_std=noise, conflict=conflict)
        for conflict in (False, True)
    ]
    return _data([worlds], evaluation_size, seed)


def mini_video_data(
    shortcut: float,
    n_events: int,
    n_segments: int,
    max_length: int,
    noise: float,
    evaluation_size: int,
    seed: int,
) -> SampleDataModule:
    """The same for videos.

    Args:
        shortcut: How often the cue is right by design.
        n_events: Squares that are seen in a video, one after the other.
        n_segments: Runs of frames in which the square asked about is seen.
        max_length: Most frames of a run.
        noise: Standard deviation of the sensor noise at full detail.
        evaluation_size: Test videos; they are the same for every seed.
        seed: Of the training videos.

    Raises:
        ValueError: ``evaluation_size`` is no whole number of at least 1.
    """
    worlds = [
        MiniVideoWorld(n_events, n_segments, max_length, shortcut, conflict, noise)
        for conflict in (False, True)
    ]
    return _data([worlds], evaluation_size, seed)


def mini_mixed_data(shortcut: float, evaluation_size: int, seed: int) -> SampleDataModule:
    """Images and videos in equal numbers, each world at its default difficulty.

    Args:
        shortcut: How often the cue is right by design, in both worlds.
        evaluation_size: Test samples; half of them are videos.
        seed: Of the training samples.

    Raises:
        ValueError: ``evaluation_size`` is no even whole number of at least 2.
    """
    check_evaluation_size(evaluation_size)
    if evaluation_size % 2:
        raise ValueError(
            f"data.evaluation_size is {evaluation_size}: half of the items are images and half "
            "videos, so give an even number."
        )
    image = [MiniWorld(cue_strength=shortcut, conflict=conflict) for conflict in (False, True)]
    video = [MiniVideoWorld(cue_strength=shortcut, conflict=conflict) for conflict in (False, True)]
    return _data([image, video], evaluation_size, seed)


def _data(worlds: Sequence[Sequence[World]], evaluation_size: int, seed: int) -> SampleDataModule:
    """The data of worlds, each given without and with conflict."""
    check_evaluation_size(evaluation_size)
    share, train_share = evaluation_size // len(worlds), TRAIN_SIZE // len(worlds)
    return SampleDataModule(
        AlternatingSource([WorldSource(plain, "train", train_share, seed) for plain, _ in worlds]),
        AlternatingSource([WorldSource(plain, "test", share) for plain, _ in worlds]),
        AlternatingSource([WorldSource(conflict, "test", share) for _, conflict in worlds]),
        seed,
    )
