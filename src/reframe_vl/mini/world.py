"""The mini image world: a picture too coarse to read as a whole, and a crop that shows the answer.

A canvas of 128×128 pixels carries coloured squares with a digit on each. Every view, whole or
cropped, is 32×32 by default and has sensor noise, so that the digit is hard to read on the whole
view and easy on a crop of its square.

The whole view also has a *cue*: a ring along its border whose hue names a digit, the right one
more often than chance. No crop shows it. It is the shortcut that a policy can take instead of
looking.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from reframe_vl.mini.glyphs import COLOR_NAMES, HUES, NUM_DIGITS, digit_tile
from reframe_vl.types import RGB, Answer, Applicability, Box, Evidence, ImageMedia, Modality, Sample

GRID = 8
"""Units along a side of the canvas; one unit is 125 on the 0–1000 grid of coordinates."""
UNIT_PX = 16
CANVAS_PX = GRID * UNIT_PX
SQUARE_UNITS = 2
SQUARE_PX = SQUARE_UNITS * UNIT_PX
CELLS = GRID // SQUARE_UNITS
"""Places for a square along a side: squares stand on even units only."""

VIEW_BUDGET = 1024
"""The default budget of a view in pixels: 32×32."""
VIEW_MULTIPLE = 8
MIN_VIEW_SIDE = 16


def view_side(max_pixels: int) -> int:
    """Side of a view under a pixel budget: a multiple of 8, at least 16."""
    return max(MIN_VIEW_SIDE, math.isqrt(max_pixels) // VIEW_MULTIPLE * VIEW_MULTIPLE)


@lru_cache(maxsize=4096)
def region_weights(start: float, stop: float, num_out: int) -> npt.NDArray[np.float32]:
    """Resamples one axis of a region by exact area averaging.

    Args:
        start: Where the region begins, in pixels of the canvas; may lie within a pixel.
        stop: Where it ends.
        num_out: Pixels to make of it.

    Returns:
        Weights of the pixels that the region touches, shape (num_out, touched); each row sums to 1.
    """
    edges = np.linspace(start, stop, num_out + 1)
    pixels = np.arange(math.floor(start), math.ceil(stop))
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    weights = np.maximum(overlap, 0.0, out=overlap)
    weights /= weights.sum(1, keepdims=True)
    return weights.astype(np.float32)


def area_weights(
    start: float, stop: float, num_out: int, num_in: int = CANVAS_PX
) -> npt.NDArray[np.float32]:
    """``region_weights`` among all ``num_in`` pixels along the axis, shape (num_out, num_in)."""
    weights = np.zeros((num_out, num_in), np.float32)
    weights[:, math.floor(start) : math.ceil(stop)] = region_weights(start, stop, num_out)
    return weights


@dataclass(frozen=True, slots=True)
class Square:
    """A coloured square with a digit on it.

    Attributes:
        column: Left edge in units, even.
        row: Top edge in units, even.
    """

    color: str
    digit: int
    column: int
    row: int

    @property
    def box(self) -> Box:
        """The square in pixels of the canvas."""
        x, y = self.column * UNIT_PX, self.row * UNIT_PX
        return (float(x), float(y), float(x + SQUARE_PX), float(y + SQUARE_PX))


@dataclass(frozen=True)
class MiniImage(ImageMedia):
    """A scene that is drawn when it is looked at.

    Attributes:
        squares: The first one is asked about.
        background: Grey level.
        cue_digit: The digit that the hue of the whole view's ring names.
        noise_std: Of the sensor noise, on the scale where an image spans -1 to 1.
        noise_seed: With the region it decides the noise of a view: looking twice at the same
            region shows the same pixels.
    """

    squares: tuple[Square, ...]
    background: int
    cue_digit: int
    noise_std: float
    noise_seed: int

    @cached_property
    def key(self) -> str:
        """Names the content: equal keys, equal pixels."""
        return "mini-image-" + hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the canvas in pixels."""
        return (CANVAS_PX, CANVAS_PX)

    @property
    def canvas(self) -> npt.NDArray[np.float32]:
        """The scene without cue and noise, shape (128, 128, 3), values 0 to 255."""
        return _draw(self.squares, self.background)

    def look(self, box: Box | None, max_pixels: int = VIEW_BUDGET) -> RGB:
        """Renders the whole picture, with the cue, or a region of it, without.

        Every view is a square of the same size, whatever the shape of the region.

        Args:
            box: The region in pixels of the canvas; None for the whole picture.
            max_pixels: The view's budget.

        Raises:
            ValueError: The region is empty or reaches beyond the canvas.
        """
        side = view_side(max_pixels)
        x0, y0, x1, y1 = box or (0.0, 0.0, float(CANVAS_PX), float(CANVAS_PX))
        if not (0 <= x0 < x1 <= CANVAS_PX and 0 <= y0 < y1 <= CANVAS_PX):
            raise ValueError(
                f"The box {box} does not lie within the canvas of {CANVAS_PX}×{CANVAS_PX} pixels "
                "with x0 < x1 and y0 < y1: clip it first."
            )
        return _look(self, box, side)


@lru_cache(maxsize=256)
def _look(image: MiniImage, box: Box | None, side: int) -> RGB:
    """A group's rollouts ask for the same regions of an image again and again."""
    x0, y0, x1, y1 = box or (0.0, 0.0, float(CANVAS_PX), float(CANVAS_PX))
    seen = image.canvas[math.floor(y0) : math.ceil(y1), math.floor(x0) : math.ceil(x1)]
    rows = region_weights(y0, y1, side) @ seen.reshape(len(seen), -1)
    view = np.matmul(region_weights(x0, x1, side), rows.reshape(side, -1, 3))
    if box is None:
        draw_ring(view, image.cue_digit)
    region = np.array(() if box is None else (x0, y0, x1, y1), np.float64)
    # As 32-bit words, which a generator takes as they are.
    words = np.append(np.uint64(image.noise_seed), region.view(np.uint64)).view(np.uint32)
    pixels = sense(view, image.noise_std, np.random.default_rng(words))
    pixels.flags.writeable = False
    return pixels


@lru_cache(maxsize=64)
def _draw(squares: tuple[Square, ...], background: int) -> npt.NDArray[np.float32]:
    """A group's rollouts look at one canvas again and again."""
    canvas = np.full((CANVAS_PX, CANVAS_PX, 3), float(background), np.float32)
    for square in squares:
        x0, y0, x1, y1 = (int(v) for v in square.box)
        canvas[y0:y1, x0:x1] = digit_tile(square.color, square.digit, SQUARE_PX)
    canvas.flags.writeable = False
    return canvas


def sense(pixels: npt.NDArray[np.float32], noise_std: float, rng: np.random.Generator) -> RGB:
    """Adds the sensor's noise to pixel values of 0 to 255 and makes them 8-bit."""
    sensed = rng.standard_normal(pixels.shape, dtype=np.float32)
    # In place: new arrays take longer than what is done to them.
    sensed *= np.float32(127.5 * noise_std)
    sensed += pixels
    np.maximum(sensed, 0.0, out=sensed)
    np.minimum(sensed, 255.0, out=sensed)
    return np.rint(sensed, out=sensed).astype(np.uint8)


def draw_ring(view: npt.NDArray[np.float32], digit: int) -> None:
    """Paints the cue: the border of a view, 2 of 32 pixels wide, in the hue that names a digit."""
    width = max(1, len(view) // 16)
    view[:width] = view[-width:] = HUES[digit]
    view[:, :width] = view[:, -width:] = HUES[digit]


def draw_cue(digit: int, strength: float, conflict: bool, rng: np.random.Generator) -> int:
    """Draws the digit that a cue names; takes the same draws whatever the parameters.

    Args:
        digit: The right one.
        strength: Probability that the right digit is named for sure; otherwise any is named.
        conflict: Name a wrong digit, whatever ``strength``.
        rng: Random numbers.
    """
    informed, other, shift = rng.random(), rng.integers(NUM_DIGITS), rng.integers(1, NUM_DIGITS)
    if conflict:
        return int(digit + shift) % NUM_DIGITS
    return digit if informed < strength else int(other)


def sample_rng(name: str) -> np.random.Generator:
    """The random numbers of a sample, by its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def check_cue_strength(strength: float) -> None:
    """Refuses what is no probability.

    Raises:
        ValueError: It lies outside 0 to 1.
    """
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"cue_strength is {strength}: set it from 0 to 1.")


@dataclass(frozen=True)
class MiniWorld:
    """A distribution of scenes with a question about each.

    Scene and noise of a sample depend on the split, the index and the seed only; the parameters
    of the cue change nothing but the cue. So worlds with other cues are paired with this one.

    Attributes:
        n_objects: Squares of a scene, each of another colour.
        cue_strength: Probability that the cue names the right digit for sure; otherwise it names
            a digit at random.
        conflict: The cue always names a wrong digit, whatever ``cue_strength``.
        noise_std: Of the sensor noise, on the scale where an image spans -1 to 1.
    """

    n_objects: int = 1
    cue_strength: float = 0.5
    conflict: bool = False
    noise_std: float = 0.8

    def __post_init__(self) -> None:
        if not 1 <= self.n_objects <= len(COLOR_NAMES):
            raise ValueError(
                f"n_objects is {self.n_objects}, but each square needs a colour of its own: "
                f"set it from 1 to {len(COLOR_NAMES)}."
            )
        check_cue_strength(self.cue_strength)

    def sample(self, split: str, index: int, seed: int = 0) -> Sample:
        """Draws a sample.

        Args:
            split: Any name; each is a stream of its own, disjoint from all others.
            index: Position in the stream.
            seed: Of the stream.
        """
        name = f"mini_image/{seed}/{split}/{index}"
        rng = sample_rng(name)
        colors = rng.permutation(len(COLOR_NAMES))[: self.n_objects]
        cells = rng.permutation(CELLS * CELLS)[: self.n_objects]
        digits = rng.integers(NUM_DIGITS, size=self.n_objects)
        squares = tuple(
            Square(
                COLOR_NAMES[color],
                int(digit),
                int(cell) % CELLS * SQUARE_UNITS,
                int(cell) // CELLS * SQUARE_UNITS,
            )
            for color, digit, cell in zip(colors, digits, cells, strict=True)
        )
        background = int(rng.integers(20, 60))
        noise_seed = int(rng.integers(1 << 62))
        target = squares[0]
        image = MiniImage(
            squares=squares,
            background=background,
            cue_digit=draw_cue(target.digit, self.cue_strength, self.conflict, rng),
            noise_std=self.noise_std,
            noise_seed=noise_seed,
        )
        return Sample(
            id=name + ("/conflict" if self.conflict else ""),
            modality=Modality.IMAGE,
            media=image,
            question=f"What digit is on the {target.color} square?",
            answer=Answer(kind="number", value=str(target.digit)),
            # This box is the *expanded* evidence already: nothing is to be added around it.
            evidence=Evidence(boxes=(target.box,)),
            # Coverage is 1/16, far below the 0.25 from which on a call stops being beneficial.
            applicability=Applicability.BENEFICIAL,
            source="mini_image",
            split=split,
        )
