"""A verifier for the mini worlds: rules that read colours and digits off the pixels.

It knows the camera and the font, as a reader knows letters: where squares can stand and what each
would look like in a view. It knows nothing of the scene. Where the pixels do not tell digits apart
it says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from reframe_vl.data.verifiers.base import Picture, Query, Reply
from reframe_vl.data.verifiers.questions import UNKNOWN
from reframe_vl.mini.glyphs import COLOR_NAMES, COLORS, NUM_DIGITS, digit_tile
from reframe_vl.mini.world import SQUARE_PX, area_weights
from reframe_vl.types import RGB

_QUESTION = re.compile(r"What digit is on the (\w+) square")

_SEEN_NATS = 12.0
"""How much likelier a square has to be than a plain surface."""

Scores = npt.NDArray[np.float64]


class RuleVerifier:
    """Answers what digit is on a square of some colour.

    Args:
        min_nats: How much likelier the best digit has to be than the second, in natural logarithms.
    """

    name = "rules"

    def __init__(self, min_nats: float = 5.0) -> None:
        self.min_nats = min_nats

    @property
    def identity(self) -> str:
        """The rules' version and threshold."""
        return f"mini rules 1, {self.min_nats:g} nats"

    def answer(self, queries: Sequence[Query]) -> Iterator[tuple[int, Reply]]:
        """Answers in order."""
        for number, query in enumerate(queries):
            yield number, Reply(f"<answer>{self._answer(query)}</answer>")

    def _answer(self, query: Query) -> str:
        asked = _QUESTION.search(query.question)
        if asked is None or asked[1] not in COLOR_NAMES:
            return UNKNOWN
        digit = self._seen(query, asked[1]) if query.pictures else _told(query.question)
        if digit is None:
            return UNKNOWN
        if not query.options:
            return str(digit)
        if str(digit) not in query.options:
            return UNKNOWN
        return chr(ord("A") + query.options.index(str(digit)))

    def _seen(self, query: Query, color: str) -> int | None:
        pairs = zip(query.pictures, query.pixels(), strict=True)
        found = [scores for pair in pairs if (scores := read_square(*pair, color)) is not None]
        if not found:
            return None
        total = np.sum(found, 0)
        second, best = np.sort(total)[-2:]
        return int(total.argmax()) if best - second >= self.min_nats else None


def _told(question: str) -> int | None:
    """The digit that the words give away."""
    digits = set(re.findall(r"\b\d\b", question))
    return int(digits.pop()) if len(digits) == 1 else None


def read_square(picture: Picture, pixels: RGB, color: str) -> Scores | None:
    """How well each digit explains a square of a colour in a view, in nats; None if none is seen.

    Args:
        pixels: Of the picture.
    """
    width, height = picture.media.size
    x0, y0, x1, y1 = picture.box or (0.0, 0.0, float(width), float(height))
    # A whole view has a frame around it that belongs to no square.
    border = max(1, len(pixels) // 16) if picture.box is None else 0
    best: Scores | None = None
    for top in range(0, height, SQUARE_PX):
        rows = _lines(y0, y1, len(pixels), height, top, border)
        for left in range(0, width, SQUARE_PX):
            columns = _lines(x0, x1, pixels.shape[1], width, left, border)
            if len(rows[0]) < 2 or len(columns[0]) < 2:
                continue
            scores = _scores(pixels[np.ix_(rows[0], columns[0])], rows[1], columns[1])
            squares = scores.max(1)
            seen = squares.max() >= _SEEN_NATS and COLOR_NAMES[squares.argmax()] == color
            if seen and (best is None or squares.max() > best.max()):
                best = scores[COLOR_NAMES.index(color)]
    return best


def _lines(
    start: float, stop: float, num_out: int, num_in: int, edge: int, border: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Which lines of a view lie within a square along an axis, and how they are made of its."""
    weights = area_weights(start, stop, num_out, num_in)[:, edge : edge + SQUARE_PX]
    inside = np.flatnonzero(weights.sum(1) > 0.99)
    inside = inside[(inside >= border) & (inside < num_out - border)]
    return inside, weights[inside]


_COLORS = np.array([COLORS[name] for name in COLOR_NAMES], np.float64)
_WHITE = 255.0


@lru_cache(maxsize=1)
def _glyphs() -> npt.NDArray[np.float32]:
    """How much of each pixel of a square is white, shape (digits, side, side)."""
    tiles = np.stack([digit_tile(COLOR_NAMES[0], d, SQUARE_PX) for d in range(NUM_DIGITS)])
    return (tiles == _WHITE).all(-1).astype(np.float32)


def _scores(pixels: RGB, rows: npt.NDArray[np.float32], columns: npt.NDArray[np.float32]) -> Scores:
    """Log-likelihood ratios of each square to a plain surface, shape (colours, digits).

    Brightness, contrast and noise of the view are free: what counts is the correlation r of what is
    seen and what is expected, c + (255 - c)·g in each channel of colour c, where g is the share of
    white: -n/2·log(1 - r²).
    """
    white = (rows @ _glyphs() @ columns.T).reshape(NUM_DIGITS, -1).astype(np.float64)
    seen = pixels.reshape(-1, 3).astype(np.float64)
    seen -= seen.mean()
    plain, rest = _COLORS, _WHITE - _COLORS
    shared = (plain @ seen.sum(0))[:, None] + rest @ (white @ seen).T
    once, twice = white.sum(1), (white**2).sum(1)
    total = (plain.sum(1) * len(seen))[:, None] + np.outer(rest.sum(1), once)
    squares = (
        ((plain**2).sum(1) * len(seen))[:, None]
        + 2 * np.outer((plain * rest).sum(1), once)
        + np.outer((rest**2).sum(1), twice)
    )
    variance = np.maximum(squares - total**2 / seen.size, 1e-9)
    correlation = shared / np.sqrt(variance * (seen**2).sum()).clip(1e-9)
    scores: Scores = -0.5 * seen.size * np.log1p(-(correlation.clip(0.0, 1 - 1e-9) ** 2))
    return scores
