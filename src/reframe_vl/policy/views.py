"""From pixels to views: the one place where images are resized for a model and cut into patches.

A view's sides are multiples of ``patch_size * merge_size`` within the pixel budget, so that any
processor of the family (vLLM's, transformers') leaves it as it is.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from reframe_vl.types import RGB, Modality, View

MAX_ASPECT_RATIO = 100
"""Longer images are padded with grey along their short side: the family's processors refuse
ratios above 200, and a side must keep at least one patch."""

_GREY = 127


class ViewError(ValueError):
    """An image that cannot be shown to the model."""


@dataclass(frozen=True)
class ViewMaker:
    """Resizes images and videos for one model and cuts them into patches.

    Attributes:
        patch_size: Side of a patch in pixels.
        merge_size: Patches along a side that become one token.
        temporal_patch_size: Frames of a patch; the last one of a view is repeated to fill it, so
            that a still image stands in it again and again.
        min_pixels: Smaller images are enlarged to this.
        max_pixels: Larger images are reduced to this.
        mean: Per channel, of pixel values in [0, 1].
        std: Per channel.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ViewMaker:
        """Reads the image processor's settings from a checkpoint folder.

        Raises:
            FileNotFoundError: The folder holds no processor settings.
        """
        folder = Path(folder)
        for name in ("processor_config.json", "preprocessor_config.json"):
            path = folder / name
            if path.is_file():
                settings = json.loads(path.read_text())
                settings = settings.get("image_processor", settings)
                size = settings.get("size", {})
                return cls(
                    patch_size=settings["patch_size"],
                    merge_size=settings["merge_size"],
                    temporal_patch_size=settings["temporal_patch_size"],
                    min_pixels=settings.get("min_pixels") or size["shortest_edge"],
                    max_pixels=settings.get("max_pixels") or size["longest_edge"],
                    mean=tuple(settings["image_mean"]),
                    std=tuple(settings["image_std"]),
                )
        raise FileNotFoundError(
            f"{folder} has neither processor_config.json nor preprocessor_config.json: "
            "copy the image processor's settings from the model's release into it."
        )

    @property
    def factor(self) -> int:
        """Sides of a view are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    def view(self, image: RGB, max_pixels: int | None = None) -> View:
        """Resizes an image to a view of at most ``max_pixels`` (the model's own limit by default).

        Raises:
            ViewError: The image has an empty side.
        """
        height, width = self.fed_size(image.shape[0], image.shape[1], max_pixels)
        grid = (1, height // self.patch_size, width // self.patch_size)
        return View.of(_resized(image, height, width), grid, self.num_tokens(height, width))

    def video(
        self, frames: Sequence[RGB], times_s: Sequence[float], max_pixels: int | None = None
    ) -> View:
        """Resizes frames to one video view of at most ``max_pixels`` a frame.

        Args:
            frames: In order; all are fed at the size of the first one.
            times_s: When each of them is.
            max_pixels: The model's own limit by default.

        Raises:
            ViewError: A frame has an empty side.
        """
        height, width = self.fed_size(frames[0].shape[0], frames[0].shape[1], max_pixels)
        patches = self.temporal_patches(len(frames))
        interval = (times_s[-1] - times_s[0]) / (len(frames) - 1) if patches > 1 else 0.0
        return View.of(
            np.concatenate([_resized(frame, height, width) for frame in frames]),
            (patches, height // self.patch_size, width // self.patch_size),
            patches * self.num_tokens(height, width),
            Modality.VIDEO,
            interval * self.temporal_patch_size,
        )

    def temporal_patches(self, num_frames: int) -> int:
        """Temporal patches of a video of so many frames."""
        return -(-num_frames // self.temporal_patch_size)

    def fed_size(self, height: int, width: int, max_pixels: int | None = None) -> tuple[int, int]:
        """(height, width) at which an image of this size is fed.

        Raises:
            ViewError: A side is empty.
        """
        if not height or not width:
            raise ViewError(f"An image of {width}x{height} pixels cannot be shown.")
        shortest = -(-max(height, width) // MAX_ASPECT_RATIO)
        budget = min(max_pixels or self.max_pixels, self.max_pixels)
        return smart_resize(
            max(height, shortest),
            max(width, shortest),
            self.factor,
            min(self.min_pixels, budget),
            budget,
        )

    def num_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image that is fed at this size."""
        return height * width // self.factor**2

    def patches(self, views: list[View]) -> npt.NDArray[np.float32]:
        """Normalises views and cuts them into patches, as the model's vision tower takes them.

        Returns:
            Shape (patches of all views, channels * temporal_patch_size * patch_size ** 2).

        Raises:
            ViewError: A view was read back without its pixels.
        """
        frames = [_frames(view) for view in views]
        sizes = [math.prod(view.grid_thw) for view in views]
        depth = 3 * self.temporal_patch_size * self.patch_size**2
        patches = np.empty((sum(sizes), depth), np.float32)
        start = 0
        # Neighbours of one shape are cut together.
        for _, group in itertools.groupby(range(len(views)), lambda index: frames[index].shape):
            members = list(group)
            stop = start + len(members) * sizes[members[0]]
            self._cut(np.stack([frames[index] for index in members]), patches[start:stop])
            start = stop
        return patches

    def _cut(self, pixels: npt.NDArray[np.uint8], patches: npt.NDArray[np.float32]) -> None:
        """Fills patches, shape (patches, -1), from pixels of shape (views, frames, H, W, 3)."""
        p, m, t = self.patch_size, self.merge_size, self.temporal_patch_size
        views, frames, height, width, _ = pixels.shape
        if frames == 1:
            # Its copies fill the patch at the end, where they are cheapest.
            shown = 1
        else:
            shown = t
            filled = np.minimum(np.arange(self.temporal_patches(frames) * t), frames - 1)
            pixels = pixels[:, filled]
        cut = pixels.reshape(
            views, -1, shown, height // (m * p), m, p, width // (m * p), m, p, 3
        ).transpose(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
        cut = np.ascontiguousarray(cut).reshape(-1, 3, shown, p, p)
        filled_in = patches.reshape(-1, 3, t, p, p)
        # There are few values: normalising each once is much less than every pixel's.
        scaled = np.arange(256, dtype=np.float32) * np.float32(1 / 255)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            normal = (scaled - np.float32(mean)) / np.float32(std)
            filled_in[:, channel] = normal[cut[:, channel]]


def _frames(view: View) -> npt.NDArray[np.uint8]:
    if view.pixels is None:
        raise ViewError(
            f"View {view.hash} has no pixels: read the rollouts back with their images folder."
        )
    return np.stack(view.frames)


def _resized(image: RGB, height: int, width: int) -> RGB:
    image = _limit_aspect_ratio(image)
    if (height, width) == image.shape[:2]:
        return image
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized)


def _limit_aspect_ratio(image: RGB) -> RGB:
    height, width = image.shape[:2]
    short = -(-max(height, width) // MAX_ASPECT_RATIO)
    missing_h, missing_w = max(0, short - height), max(0, short - width)
    if not missing_h and not missing_w:
        return image
    padding = (
        (missing_h // 2, missing_h - missing_h // 2),
        (missing_w // 2, missing_w - missing_w // 2),
        (0, 0),
    )
    return np.pad(image, padding, constant_values=_GREY)
