"""What the mini worlds are drawn with: colours, digits in a 5×7 font, the cue's hues."""

from __future__ import annotations

import colorsys

import numpy as np
import numpy.typing as npt

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (225, 205, 40),
    "purple": (150, 50, 190),
    "orange": (240, 140, 30),
    "cyan": (50, 200, 210),
    "pink": (245, 150, 190),
}
COLOR_NAMES = tuple(COLORS)

NUM_DIGITS = 10

_FONT_ROWS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
FONT = tuple(
    np.array([[int(bit) for bit in row] for row in rows.split()], dtype=bool) for rows in _FONT_ROWS
)
"""One bitmap of 7 rows and 5 columns a digit."""

HUES = tuple(
    tuple(200.0 * channel for channel in colorsys.hsv_to_rgb(digit / NUM_DIGITS, 1.0, 1.0))
    for digit in range(NUM_DIGITS)
)
"""The colour by which the cue names a digit."""


def digit_tile(
    color: str, digit: int, side: int, magnification: int = 2
) -> npt.NDArray[np.float32]:
    """Draws a white digit in the middle of a coloured square.

    Args:
        color: One of ``COLOR_NAMES``.
        digit: 0 to 9.
        side: Pixels of the square's side.
        magnification: Pixels of one dot of the font.

    Returns:
        The square, shape (side, side, 3), values 0 to 255.
    """
    tile = np.empty((side, side, 3), np.float32)
    tile[:] = COLORS[color]
    glyph = FONT[digit].repeat(magnification, 0).repeat(magnification, 1)
    height, width = glyph.shape
    top, left = (side - height) // 2, (side - width) // 2
    tile[top : top + height, left : left + width][glyph] = 255.0
    return tile
