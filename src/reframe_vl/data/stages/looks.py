"""What verifiers are shown of a record's media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reframe_vl.data.evidence import (
    MAX_FRAMES,
    expand_box,
    expand_segments,
    subsample_frames,
)
from reframe_vl.data.records import Record
from reframe_vl.data.verifiers.base import Picture
from reframe_vl.types import Box, Media, VideoMedia


@dataclass(frozen=True)
class LookSettings:
    """Budgets of what is shown, in pixels; ours.

    Attributes:
        image_pixels: Of the whole image, or of one region.
        frame_pixels: Of each frame of a video.
        image_glance_pixels: Of the whole image at a mere glance.
        frame_glance_pixels: Of each frame at a mere glance.
        max_frames: The most frames of one segment.
    """

    image_pixels: int = 1280 * 1280
    frame_pixels: int = 448 * 448
    image_glance_pixels: int = 64 * 64
    frame_glance_pixels: int = 32 * 32
    max_frames: int = MAX_FRAMES


def _whole(media: Media, image_pixels: int, frame_pixels: int) -> tuple[Picture, ...]:
    """The image, or every frame of the video's grid."""
    if isinstance(media, VideoMedia):
        return tuple(
            Picture(media, frame_pixels, frame=frame) for frame in range(len(media.timestamps_s))
        )
    return (Picture(media, image_pixels),)


def full(media: Media, settings: LookSettings) -> tuple[Picture, ...]:
    """Everything, in full detail."""
    return _whole(media, settings.image_pixels, settings.frame_pixels)


def glance(media: Media, settings: LookSettings) -> tuple[Picture, ...]:
    """Everything, so small that only what is plain to see can be seen."""
    return _whole(media, settings.image_glance_pixels, settings.frame_glance_pixels)


def evidence(record: Record, media: Media, settings: LookSettings) -> tuple[Picture, ...]:
    """The evidence alone, expanded as it will be in the end; nothing where there is none.

    Raises:
        ValueError: A box or segment lies outside the media.
    """
    if isinstance(media, VideoMedia):
        end_s = record.media.duration_s or media.timestamps_s[-1]
        runs = expand_segments(record.segments, media.timestamps_s, end_s)
        frames = {frame for run in runs for frame in subsample_frames(run, settings.max_frames)}
        return tuple(Picture(media, settings.frame_pixels, frame=f) for f in sorted(frames))
    return regions([box.xyxy for box in record.boxes], media, settings)


def regions(boxes: Sequence[Box], media: Media, settings: LookSettings) -> tuple[Picture, ...]:
    """Regions of an image, expanded.

    Raises:
        ValueError: A box lies outside the image.
    """
    return tuple(
        Picture(media, settings.image_pixels, expand_box(box, media.size)) for box in boxes
    )
