"""The mini world as a source of numbered samples, and the data of its experiments."""

from __future__ import annotations

from reframe_vl.data.datamodule import SampleDataModule, check_evaluation_size
from reframe_vl.mini.world import MiniWorld
from reframe_vl.types import Sample


class WorldSource:
    """Samples of a world's split; the split and the seed decide what they are.

    Args:
        world: The world and its difficulty.
        split: Splits share no sample.
        size: Samples before they repeat.
        seed: Another seed, other samples.
    """

    def __init__(self, world: MiniWorld, split: str, size: int, seed: int = 0) -> None:
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
    check_evaluation_size(evaluation_size)
    world = MiniWorld(n_objects=n_objects, cue_strength=shortcut, noise_std=noise)
    conflict = MiniWorld(n_objects=n_objects, cue_strength=shortcut, noise_std=noise, conflict=True)
    return SampleDataModule(
        WorldSource(world, "train", 100_000, seed),
        WorldSource(world, "test", evaluation_size),
        WorldSource(conflict, "test", evaluation_size),
        seed,
    )
