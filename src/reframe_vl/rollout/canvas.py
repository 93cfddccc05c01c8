"""Images, frames, tiles and rows of text: what pictures of rollouts are put together from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from reframe_vl.rollout.transcript import printable
from reframe_vl.types import RGB, Box, View

Color: TypeAlias = tuple[int, int, int]

MARGIN = 6
"""Around every image: dashed frames lie outside of an edge, which may be the image's own."""
PICTURE_SIDES = (256, 1024)
"""The long side of the original: smaller ones are enlarged by a whole factor, larger reduced."""
TILE_SIDES = (96, 192)
"""The same for what tools returned and for the frames of a video."""

_BACKGROUND: Color = (250, 250, 250)
_MISSING: Color = (190, 190, 190)
_INK: Color = (0, 0, 0)
_LINE = 2
_DASHED_LINE = 4
_DASH, _GAP = 9, 5
_FONT_SIZE = 13
_TEXT_HEIGHT = 17
_MAX_TEXT = 300


@dataclass(frozen=True)
class Frame:
    """A frame around a region of an image.

    Attributes:
        box: In pixels of the original.
        dashed: Thicker, in dashes and outside of the region's edge, where others are inside: so
            both are seen where they are the same.
    """

    box: Box
    color: Color
    label: str = ""
    dashed: bool = False


def readable(pixels: RGB, sides: tuple[int, int]) -> Image.Image:
    """Enlarges or reduces an image until its long side is within limits."""
    image = Image.fromarray(pixels)
    long_side, (least, most) = max(image.size), sides
    if long_side > most:
        image.thumbnail((most, most), Image.Resampling.BICUBIC)
        return image
    factor = math.ceil(least / long_side)
    # Pixels stay pixels: what the policy could not see shall not look smooth.
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def framed(image: Image.Image, frames: Sequence[Frame], size: tuple[int, int]) -> Image.Image:
    """Puts a margin around an image and frames on it.

    Args:
        image: The original, enlarged or reduced.
        frames: Those of the same region are drawn one within the other.
        size: (width, height) of the original.
    """
    canvas = Image.new("RGB", (image.width + 2 * MARGIN, image.height + 2 * MARGIN), _BACKGROUND)
    canvas.paste(image, (MARGIN, MARGIN))
    draw = ImageDraw.Draw(canvas)
    x_scale, y_scale = image.width / size[0], image.height / size[1]
    drawn: list[Box] = []
    label_ends: dict[Box, int] = {}
    for frame in frames:
        x0, x1 = (MARGIN + round(x * x_scale) for x in frame.box[0::2])
        y0, y1 = (MARGIN + round(y * y_scale) for y in frame.box[1::2])
        x1, y1 = max(x0 + 1, x1), max(y0 + 1, y1)
        if frame.dashed:
            _dashed(draw, (x0, y0, x1, y1), frame.color)
            continue
        inset = _LINE * drawn.count(frame.box)
        drawn.append(frame.box)
        if min(x1 - x0, y1 - y0) > 2 * inset:
            edge = (x0 + inset, y0 + inset, x1 - 1 - inset, y1 - 1 - inset)
            draw.rectangle(edge, outline=frame.color, width=_LINE)
        if frame.label:
            above = y0 >= _TEXT_HEIGHT
            top = y0 - _TEXT_HEIGHT if above else min(y1, canvas.height - _TEXT_HEIGHT)
            left = label_ends.get(frame.box, x0 - 1) + 1
            left = max(0, min(left, canvas.width - _chip_width(frame.label)))
            label_ends[frame.box] = _chip(draw, (left, top), frame.label, frame.color)
    return canvas


def _dashed(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], color: Color) -> None:
    x0, y0, x1, y1 = box
    w = _DASHED_LINE
    for start in range(x0 - w, x1 + w, _DASH + _GAP):
        stop = min(start + _DASH, x1 + w) - 1
        draw.rectangle((start, y0 - w, stop, y0 - 1), fill=color)
        draw.rectangle((start, y1, stop, y1 + w - 1), fill=color)
    for start in range(y0 - w, y1 + w, _DASH + _GAP):
        stop = min(start + _DASH, y1 + w) - 1
        draw.rectangle((x0 - w, start, x0 - 1, stop), fill=color)
        draw.rectangle((x1, start, x1 + w - 1, stop), fill=color)


def tile(view: View | None, name: str, colors: Mapping[Color, bool]) -> Image.Image:
    """A view with its name above it; grey where its pixels are not known.

    Args:
        view: What to show.
        name: Its name.
        colors: Of the frames around it, and whether they are dashed.
    """
    if view is None or view.pixels is None:
        image = Image.new("RGB", (TILE_SIDES[0], TILE_SIDES[0]), _MISSING)
    else:
        image = readable(view.pixels, TILE_SIDES)
    whole = (0.0, 0.0, float(image.width), float(image.height))
    frames = [Frame(whole, color, dashed=dashed) for color, dashed in colors.items()]
    image = framed(image, frames, image.size)
    width = max(image.width, math.ceil(_font().getlength(name)) + 2 * MARGIN)
    named = Image.new("RGB", (width, image.height + _TEXT_HEIGHT), _BACKGROUND)
    named.paste(image, (0, _TEXT_HEIGHT))
    ImageDraw.Draw(named).text((MARGIN, 1), name, _INK, _font())
    return named


def text_block(lines: Sequence[str], legend: Mapping[str, Color], width: int) -> Image.Image:
    """Coloured names in a row, and lines of text below them, wrapped to a width."""
    rows = [row for line in lines for row in _wrap(line, width - 2 * MARGIN)]
    block = Image.new("RGB", (width, _TEXT_HEIGHT * (len(rows) + 2)), _BACKGROUND)
    draw = ImageDraw.Draw(block)
    left = MARGIN
    for name, color in legend.items():
        left = _chip(draw, (left, 2), name, color) + MARGIN
    for row, text in enumerate(rows, 1):
        draw.text((MARGIN, _TEXT_HEIGHT * row + MARGIN), text, _INK, _font())
    return block


def _chip(draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, color: Color) -> int:
    """Writes on a coloured ground; returns where it ends on the right."""
    right = at[0] + _chip_width(text) - 1
    draw.rectangle((*at, right, at[1] + _TEXT_HEIGHT - 1), fill=color)
    draw.text((at[0] + 3, at[1] + 1), text, _INK, _font())
    return right


def _chip_width(text: str) -> int:
    return math.ceil(_font().getlength(text)) + 7


def _wrap(text: str, width: int) -> list[str]:
    """Breaks a text, cut to a readable length, into rows of at most so many pixels."""
    text = printable(text).replace("\n", "\\n")
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    rows = [""]
    for character in text:
        if _font().getlength(rows[-1] + character) > width:
            rows.append("    ")
        rows[-1] += character
    return rows


def flow(tiles: Sequence[Image.Image], width: int) -> Image.Image:
    """Lays tiles in rows of at most this width."""
    rows: list[list[Image.Image]] = [[]]
    for image in tiles:
        if rows[-1] and sum(other.width for other in rows[-1]) + image.width > width:
            rows.append([])
        rows[-1].append(image)
    return stack([beside(*row) for row in rows])


def beside(*images: Image.Image) -> Image.Image:
    """Puts images in a row."""
    size = (sum(i.width for i in images), max((i.height for i in images), default=0))
    canvas = Image.new("RGB", size, _BACKGROUND)
    left = 0
    for image in images:
        canvas.paste(image, (left, 0))
        left += image.width
    return canvas


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Puts images below each other."""
    size = (max(i.width for i in images), sum(i.height for i in images))
    canvas = Image.new("RGB", size, _BACKGROUND)
    top = 0
    for image in images:
        canvas.paste(image, (0, top))
        top += image.height
    return canvas


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)
