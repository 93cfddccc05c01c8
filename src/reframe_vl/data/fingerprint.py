"""What a picture or video looks like, in a few bytes: near duplicates have near fingerprints."""

from __future__ import annotations

import imagehash
import numpy as np
import numpy.typing as npt
from PIL import Image

from reframe_vl.data.video import GridRule, VideoFile
from reframe_vl.types import Media, VideoMedia

_LOOK_PIXELS = 128 * 128
"""Budget of the look that is hashed: a hash has 8×8 bits, of the lowest frequencies."""

VIDEO_FRAMES = 8
"""Frames of a video that are hashed, spread evenly over it."""

_EVERY_VIDEO = GridRule(fps=1000.0, max_frames=VIDEO_FRAMES)
"""So that copies are hashed at the same times, whatever grids their records have."""


def fingerprint(media: Media) -> tuple[str, ...]:
    """Perceptual hashes (``imagehash.phash``) of an image, or of frames of a video; as hex.

    Raises:
        MediaError: The file cannot be read.
    """
    if isinstance(media, VideoFile):
        media = VideoFile(media.path, _EVERY_VIDEO)
    if isinstance(media, VideoMedia):
        count = len(media.timestamps_s)
        chosen = sorted({round(i) for i in np.linspace(0, count - 1, min(count, VIDEO_FRAMES))})
        pictures = media.look(chosen, _LOOK_PIXELS)
    else:
        pictures = [media.look(None, _LOOK_PIXELS)]
    return tuple(str(imagehash.phash(Image.fromarray(pixels))) for pixels in pictures)


def as_words(prints: tuple[str, ...]) -> npt.NDArray[np.uint64]:
    """A fingerprint as numbers, one a frame."""
    return np.array([int(word, 16) for word in prints], np.uint64)


def distances(
    prints: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """How many of the 64 bits differ on average over the frames.

    Args:
        prints: Of one, shape (frames,).
        others: Shape (number, frames).
    """
    different: npt.NDArray[np.float64] = np.bitwise_count(prints ^ others).mean(-1)
    return different
