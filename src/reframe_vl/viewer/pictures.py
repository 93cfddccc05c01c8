"""The images that rollouts saw, small enough to go into a page, each once."""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from PIL import Image

from reframe_vl.data.report import RecordError
from reframe_vl.rollout.store import load_view
from reframe_vl.types import RGB, Modality, View

logger = logging.getLogger(__name__)

_EXACT_SIDE = 64
"""Images up to this side keep every pixel: at that size each is to be seen."""
_WEBP_QUALITY = 80


@dataclass
class Pictures:
    """Collects images by content.

    Attributes:
        side: Longest side of an image in the page; frames of a video get half of it.
        lines: One text an image: ``WIDTHxHEIGHT;TYPE;BASE64``, or a reason after ``!``.
        missing: Images that could not be read.
    """

    side: int
    lines: list[str] = field(default_factory=list)
    missing: int = 0
    _places: dict[str, list[int]] = field(default_factory=dict)

    def add(self, view: View, step_file: Path) -> list[int]:
        """The numbers of a view's images: one, or one a frame of a native video."""
        if view.hash not in self._places:
            self._places[view.hash] = self._load(view, step_file)
        return self._places[view.hash]

    def _load(self, view: View, step_file: Path) -> list[int]:
        if self.side == 0:
            return self._keep(["!left out (--side 0)"])
        try:
            frames = load_view(view, step_file).frames
        except RecordError as error:
            self.missing += 1
            if self.missing == 1:
                logger.warning("An image is shown as missing: %s", error)
            return self._keep(["!missing or damaged"])
        side = self.side // 2 if view.modality is Modality.VIDEO else self.side
        return self._keep([encode(frame, side) for frame in frames])

    def _keep(self, lines: list[str]) -> list[int]:
        first = len(self.lines)
        self.lines += lines
        return list(range(first, len(self.lines)))


def encode(pixels: RGB, side: int) -> str:
    """Reduces an image to a longest side and writes it as text."""
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    exact = max(image.size) <= _EXACT_SIDE
    stream = BytesIO()
    if exact:
        image.save(stream, "PNG", compress_level=9)
    else:
        image.save(stream, "WEBP", quality=_WEBP_QUALITY)
    name = "png" if exact else "webp"
    return f"{image.width}x{image.height};{name};{base64.b64encode(stream.getvalue()).decode()}"
