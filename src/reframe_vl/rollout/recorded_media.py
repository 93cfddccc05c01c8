"""Stand-ins for the media of samples that were read back from rollout records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reframe_vl.data.media import MediaError
from reframe_vl.types import RGB, Box, ImageMedia, VideoMedia


@dataclass(frozen=True)
class RecordedImage(ImageMedia):
    """Stands for the image of a sample that was read back: it is known, but not at hand.

    Key and size are empty where the image could not be read when the rollout was written.
    """

    recorded_key: str
    recorded_size: tuple[int, int]

    @property
    def key(self) -> str:
        """Names the content."""
        return self.recorded_key

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the original."""
        return self.recorded_size

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        """Raises MediaError."""
        raise _not_at_hand(self.key)


@dataclass(frozen=True)
class RecordedVideo(VideoMedia):
    """Stands for the video of a sample that was read back, as ``RecordedImage`` for an image."""

    recorded_key: str
    recorded_size: tuple[int, int]
    recorded_timestamps_s: tuple[float, ...]

    @property
    def key(self) -> str:
        """Names the content."""
        return self.recorded_key

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of a frame of the original."""
        return self.recorded_size

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        """The time of each frame of the grid, in seconds."""
        return self.recorded_timestamps_s

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        """Raises MediaError."""
        raise _not_at_hand(self.key)


def _not_at_hand(key: str) -> MediaError:
    return MediaError(
        f"The media {key} of a recorded sample are not kept with its rollouts: take the sample of "
        "the same id from its data set to look at them."
    )
