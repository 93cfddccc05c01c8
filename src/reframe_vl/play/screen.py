"""Shows in a terminal what stands in a context: its text as it is, and its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.text import Text

from reframe_vl.rollout.transcript import printable
from reframe_vl.tools.codec import PLACEHOLDER, VIDEO_PLACEHOLDER
from reframe_vl.types import Context, Provenance, Span, View

_COLUMNS = 64
"""Most columns of an image; a character is one pixel wide and two high."""
_STYLES = {
    Provenance.PROMPT: "",
    Provenance.OBSERVED: "green",
    Provenance.SAMPLED: "blue",
    Provenance.INJECTED: "yellow",
}


class Screen:
    """Prints what a context has that was not shown yet.

    Args:
        console: Where to.
        tokenizer: Of the model.
        folder: Takes every image that is seen, as a PNG file.
        draw: Draw images in the terminal too.
    """

    def __init__(self, console: Console, tokenizer: Any, folder: Path, draw: bool) -> None:
        """Nothing is shown before the first turn."""
        self.console, self.folder, self.draw = console, folder, draw
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._placeholders = {vocabulary.get(PLACEHOLDER), vocabulary.get(VIDEO_PLACEHOLDER)}
        self._context: Context | None = None
        self._spans = 0
        self._files: dict[str, Path] = {}

    def show(self, context: Context) -> None:
        """Prints the spans that are new; all of them where the context is another one."""
        if context is not self._context:
            if self._context is not None:
                self.say(
                    "The original has left the context. From here on the model sees:", "bold red"
                )
            self._context, self._spans = context, 0
        for span in context.spans[self._spans :]:
            # What was typed stands in the terminal already.
            if span.provenance is not Provenance.SAMPLED or span.carried:
                self._show_span(span)
        self._spans = len(context.spans)

    def say(self, text: str, style: str = "dim") -> None:
        """Prints words of the game itself."""
        self.console.print(Text(text, style))

    def _show_span(self, span: Span) -> None:
        self.console.rule(f"{span.provenance}, {len(span)} tokens", style="dim", align="left")
        for part in self._parts(span):
            if isinstance(part, View):
                self._show_view(part)
            else:
                text = Text(printable(part), _STYLES.get(span.provenance, ""))
                self.console.print(text, end="", soft_wrap=True)
        self.console.print()

    def _parts(self, span: Span) -> Iterator[str | View]:
        """Text and views of a span in their order."""
        views, waiting = iter(span.views), list[int]()
        for token_id in span.token_ids:
            if token_id not in self._placeholders:
                waiting.append(token_id)
                continue
            yield self._decode(waiting)
            waiting = []
            yield next(views)
        yield self._decode(waiting)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _show_view(self, view: View) -> None:
        if view.pixels is None:
            raise ValueError("A view without pixels cannot be shown.")
        path = self._files.get(view.hash)
        if path is None:
            path = self.folder / f"seen_{len(self._files) + 1:03d}.png"
            self._files[view.hash] = path
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(view.pixels).save(path)
        height, width = view.pixels.shape[:2]
        self.console.print()
        self.say(f"[{view.modality} {width} x {height}, {view.num_tokens} tokens: {path}]")
        if self.draw and self.console.color_system in ("256", "truecolor"):
            for frame in view.frames:
                columns = min(_COLUMNS, self.console.width)
                self.console.print(half_blocks(Image.fromarray(frame), columns))


def half_blocks(image: Image.Image, columns: int) -> Text:
    """An image as text: each character is two pixels, one above the other.

    Args:
        image: Reduced to at most ``columns``, never enlarged by parts of a pixel.
        columns: Width in characters.
    """
    factor = columns // image.width
    width = image.width * factor if factor else columns
    height = max(2, round(width * image.height / image.width / 2) * 2)
    method = Image.Resampling.NEAREST if factor else Image.Resampling.BOX
    pixels = np.asarray(image.convert("RGB").resize((width, height), method))
    text = Text(end="")
    for upper, lower in zip(pixels[0::2].tolist(), pixels[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            style = Style(color=_color(above), bgcolor=_color(below))
            text.append("▀", style)
        text.append("\n")
    return text


def _color(pixel: list[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*pixel)
