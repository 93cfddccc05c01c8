"""The first stage of a base checkpoint: the vision tower learns to see, with throw-away heads.

Without it a model of this size does not come to read digits by imitation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from reframe_vl.mini.glyphs import COLOR_NAMES, NUM_DIGITS
from reframe_vl.mini.lessons import draw_box, mini_image
from reframe_vl.mini.model import PATCH_SIZE
from reframe_vl.mini.video_world import COARSE_BUDGET, FRAME_PX, MiniVideo, MiniVideoWorld
from reframe_vl.mini.world import CELLS, SQUARE_UNITS, MiniWorld, sense, view_side
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.types import RGB

logger = logging.getLogger(__name__)

SPLIT = "base"
"""The stream that bases are trained on; no other use of the world draws from it."""

NOTHING = -100
"""A cell without a digit: cross-entropy leaves it out."""


@dataclass(frozen=True)
class VisionStage:
    """How the vision tower is trained.

    Attributes:
        scenes: Scenes rendered once; noise is drawn anew in every step.
        videos: Videos rendered once, likewise. A frame at full detail looks like an exact crop, so
            coarse frames are all that is shown of them.
        batch_size: Whole views and crops of a step.
        frames: Coarse frames of a step.
        exact: Share of crops that show the square exactly; the others are off by up to a unit.
    """

    world: MiniWorld
    video_world: MiniVideoWorld
    steps: int = 800
    learning_rate: float = 3e-3
    batch_size: int = 256
    frames: int = 128
    scenes: int = 3000
    videos: int = 600
    exact: float = 0.7


@dataclass(frozen=True)
class ScenePool:
    """Noiseless views with what is to be seen on them.

    Attributes:
        whole: Whole views.
        colors: Index of each cell's colour; the number of colours where there is none.
        digits: Digit of each cell, or NOTHING.
        cues: The digit that each whole view's cue names.
        crops: Views of single squares.
        crop_digits: The digit on each crop.
    """

    whole: list[RGB]
    colors: Int[Tensor, "scenes cells"]
    digits: Int[Tensor, "scenes cells"]
    cues: Int[Tensor, "scenes"]
    crops: list[RGB]
    crop_digits: Int[Tensor, "crops"]


@dataclass(frozen=True)
class FramePool:
    """Noiseless coarse frames with what is to be seen on them.

    Attributes:
        colors: Index of each frame's colour; the number of colours where it is blank.
        cues: The digit that each frame's cue names.
    """

    frames: list[RGB]
    colors: Int[Tensor, "frames"]
    cues: Int[Tensor, "frames"]


class _Heads(nn.Module):
    """Readouts of visual tokens; a token of a whole view covers exactly one cell."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.frame_place = nn.Linear(hidden, (view_side(COARSE_BUDGET) // PATCH_SIZE) ** 2)
        self.color = nn.Linear(hidden, len(COLOR_NAMES) + 1)
        self.coarse_digit = nn.Linear(hidden, NUM_DIGITS)
        self.place = nn.Linear(hidden, CELLS * CELLS)
        self.cue = nn.Linear(hidden, NUM_DIGITS)
        self.digit = nn.Linear(hidden, NUM_DIGITS)


def train_vision(model: VisionLanguageModel, stage: VisionStage, rng: np.random.Generator) -> None:
    """Teaches the vision tower colours, places, digits and the cue, in place."""
    pool = render_pool(stage, rng)
    frame_pool = render_frames(stage, rng)
    heads = _Heads(model.config.vision_config.out_hidden_size)
    optimizer = torch.optim.AdamW(
        [*model.visual.parameters(), *heads.parameters()],
        lr=stage.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )
    # As many crops for a whole view as it has squares.
    num_whole = stage.batch_size // (stage.world.n_objects + 1)
    for step in range(stage.steps):
        set_learning_rate(optimizer, stage.learning_rate, step, stage.steps, decay=0.4)
        whole = rng.integers(len(pool.whole), size=num_whole)
        crops = rng.integers(len(pool.crops), size=stage.batch_size - num_whole)
        clean = np.stack([pool.whole[i] for i in whole] + [pool.crops[i] for i in crops])
        sensed = sense(clean.astype(np.float32), stage.world.noise_std, rng)
        tokens = visual_tokens(model, list(sensed))
        loss, digits_right, cues_right = _vision_loss(
            heads, pool, tokens, torch.from_numpy(whole), torch.from_numpy(crops)
        )
        loss = loss + _frame_step(model, heads, frame_pool, stage, rng)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            logger.info(
                "vision %d/%d: loss %.3f, digits read right %.3f, cues %.3f",
                step + 1,
                stage.steps,
                loss.item(),
                digits_right,
                cues_right,
            )


def visual_tokens(
    model: VisionLanguageModel, images: list[RGB]
) -> Float[Tensor, "images tokens hidden"]:
    """Embeddings of images of one size."""
    views = [model.view_maker.view(image) for image in images]
    features = model.encode(views)
    if features is None:
        raise ValueError("There are no images to encode: give at least one.")
    return features.gather(views)[0].unflatten(0, (len(views), -1))


def _vision_loss(
    heads: _Heads,
    pool: ScenePool,
    tokens: Float[Tensor, "images tokens hidden"],
    whole: Int[Tensor, "whole"],
    crops: Int[Tensor, "crops"],
) -> tuple[Float[Tensor, ""], float, float]:
    """The sum of all readouts' losses, and the shares of digits on crops and of cues read right."""
    on_whole, on_crops = tokens[: len(whole)], tokens[len(whole) :]
    places = torch.arange(tokens.shape[1]).repeat(len(tokens))
    digits, cues = heads.digit(on_crops.mean(1)), heads.cue(on_whole.mean(1))
    loss = (
        F.cross_entropy(heads.color(on_whole).flatten(0, 1), pool.colors[whole].flatten())
        + 0.3
        * F.cross_entropy(
            heads.coarse_digit(on_whole).flatten(0, 1),
            pool.digits[whole].flatten(),
            ignore_index=NOTHING,
        )
        + F.cross_entropy(cues, pool.cues[whole])
        + 0.5 * F.cross_entropy(heads.place(tokens).flatten(0, 1), places)
        + F.cross_entropy(digits, pool.crop_digits[crops])
    )
    return loss, _accuracy(digits, pool.crop_digits[crops]), _accuracy(cues, pool.cues[whole])


def _frame_step(
    model: VisionLanguageModel,
    heads: _Heads,
    pool: FramePool,
    stage: VisionStage,
    rng: np.random.Generator,
) -> Float[Tensor, ""]:
    """The loss of reading coarse frames: their colour, their cue, and where a token is."""
    chosen = rng.integers(len(pool.frames), size=stage.frames)
    clean = np.stack([pool.frames[i] for i in chosen]).astype(np.float32)
    noise_std = stage.video_world.noise_std * FRAME_PX / clean.shape[1]
    tokens = visual_tokens(model, list(sense(clean, noise_std, rng)))
    num_frames, num_tokens, _ = tokens.shape
    colors, cues = pool.colors[chosen], pool.cues[chosen]
    places = torch.arange(num_tokens).repeat(num_frames)
    return (
        F.cross_entropy(heads.color(tokens).flatten(0, 1), colors.repeat_interleave(num_tokens))
        + F.cross_entropy(heads.cue(tokens.mean(1)), cues)
        + 0.2 * F.cross_entropy(heads.frame_place(tokens).flatten(0, 1), places)
    )


def _accuracy(logits: Float[Tensor, "N classes"], classes: Int[Tensor, "N"]) -> float:
    return (logits.argmax(1) == classes).float().mean().item()


def render_pool(stage: VisionStage, rng: np.random.Generator) -> ScenePool:
    """Draws scenes and renders them and crops of all their squares, without noise."""
    whole, colors, digits, cues, crops, crop_digits = [], [], [], [], [], []
    for _ in range(stage.scenes):
        sample = stage.world.sample(SPLIT, int(rng.integers(1 << 40)))
        image = replace(mini_image(sample), noise_std=0.0)
        color_of = np.full((CELLS, CELLS), len(COLOR_NAMES))
        digit_of = np.full((CELLS, CELLS), NOTHING)
        for square in image.squares:
            cell = square.row // SQUARE_UNITS, square.column // SQUARE_UNITS
            color_of[cell] = COLOR_NAMES.index(square.color)
            digit_of[cell] = square.digit
            crops.append(image.look(draw_box(square.box, stage.exact, 1.0 - stage.exact, rng)))
            crop_digits.append(square.digit)
        whole.append(image.look(None))
        colors.append(color_of.ravel())
        digits.append(digit_of.ravel())
        cues.append(image.cue_digit)
    return ScenePool(
        whole,
        torch.from_numpy(np.stack(colors)),
        torch.from_numpy(np.stack(digits)),
        torch.tensor(cues),
        crops,
        torch.tensor(crop_digits),
    )


def render_frames(stage: VisionStage, rng: np.random.Generator) -> FramePool:
    """Draws videos and renders their coarse frames, without noise."""
    frames, colors, cues = [], [], []
    for _ in range(stage.videos):
        video = stage.video_world.sample(SPLIT, int(rng.integers(1 << 40))).media
        if not isinstance(video, MiniVideo):
            raise TypeError(f"The world of videos drew a {type(video).__name__}.")
        frames += replace(video, noise_std=0.0).look(range(video.num_frames), COARSE_BUDGET)
        for index in range(video.num_frames):
            event = video.event_at(index)
            colors.append(COLOR_NAMES.index(event.color) if event else len(COLOR_NAMES))
            cues.append(video.cue_digit)
    return FramePool(frames, torch.tensor(colors), torch.tensor(cues))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, decay: float
) -> None:
    """Warms up over 20 steps and falls linearly over the last part ``decay`` of all steps.

    A group's ``lr_scale`` multiplies its rate.
    """
    left = (steps - step) / (decay * steps)
    rate = peak * min(1.0, (step + 1) / 20) * min(1.0, max(0.05, left))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
