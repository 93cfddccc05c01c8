"""The media that rows name or hold: found in a folder, or unpacked into one."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from reframe_vl.data.formats.media_search import VIDEO_SUFFIXES
from reframe_vl.data.formats.rows import Refused
from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.video import GridRule, VideoFile

_LONGEST_NAME = 1024
"""Longer text is no file's name but an image in base64."""

_GAP = 16
"""White pixels between two images that are shown side by side."""

_ALL = 2**62


@dataclass(frozen=True)
class MediaStore:
    """Finds images and videos.

    Attributes:
        folder: Of the media files; None where rows hold their images.
        unpacked: Where images that rows hold are written, by their content: each once.
        rule: Lays the grids of videos.
    """

    folder: Path | None
    unpacked: Path
    rule: GridRule = field(default_factory=GridRule)

    def image(self, value: Any) -> ImageFile:
        """The image that a row's field names, or holds as bytes or in base64.

        Raises:
            Refused: There is none, or it cannot be read.
        """
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and len(value) <= _LONGEST_NAME:
            return _readable(self._find(value))
        if isinstance(value, str):
            try:
                value = base64.b64decode(value.partition("base64,")[2] or value, validate=False)
            except ValueError as error:
                raise Refused("media_unreadable", f"its image is no base64: {error}.") from error
        if not isinstance(value, bytes) or not value:
            raise Refused("media_missing", "the row has no image. Fetch the whole release.")
        return self._written(value)

    def side_by_side(self, values: Sequence[Any]) -> ImageFile:
        """One image of several, from left to right on white, all as large as they are.

        Raises:
            Refused: One of them is missing or cannot be read.
        """
        if not values:
            raise Refused("media_missing", "the row names no image. Fetch the whole release.")
        images = [self.image(value) for value in values]
        if len(images) == 1:
            return images[0]
        pixels = [image.look(None, _ALL) for image in images]
        height = max(p.shape[0] for p in pixels)
        width = sum(p.shape[1] for p in pixels) + _GAP * (len(pixels) - 1)
        canvas = np.full((height, width, 3), 255, np.uint8)
        left = 0
        for part in pixels:
            canvas[: part.shape[0], left : left + part.shape[1]] = part
            left += part.shape[1] + _GAP
        stream = io.BytesIO()
        Image.fromarray(canvas).save(stream, "PNG")
        return self._written(stream.getvalue())

    def video(self, name: str) -> VideoFile:
        """The video of a name, with its suffix or without.

        Raises:
            Refused: It is not there.
        """
        return VideoFile(self._find(name), self.rule)

    def _written(self, data: bytes) -> ImageFile:
        name = hashlib.sha256(data).hexdigest()[:32]
        path = (self.unpacked / name[:2] / name).absolute()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{name}.{os.getpid()}")
            temporary.write_bytes(data)
            try:
                _readable(temporary)
            except Refused as refused:
                temporary.unlink()
                # The file that it was tried as is nobody's.
                why = refused.message.replace(str(temporary), "the image")
                message = f"its image cannot be read: {why}"
                raise Refused("media_unreadable", message) from refused
            os.replace(temporary, path)
        return _readable(path)

    def _find(self, name: str) -> Path:
        named = PurePosixPath(name.replace("\\", "/"))
        if self.folder is None:
            raise Refused(
                "media_missing",
                f"the row names the file {name!r}: set benchmark_media to the folder of its media.",
            )
        if not named.is_absolute() and ".." not in named.parts:
            path = self.folder / named
            if os.path.isfile(path):
                return path.absolute()
        found = self._by_name.get(named.name) or self._by_name.get(named.stem, [])
        # A name without suffix may hold a dot.
        found = found or self._by_name.get(named.name.lower(), [])
        ends = [p for p in found if p.as_posix().endswith(named.as_posix().lstrip("/"))] or found
        if not ends:
            raise Refused(
                "media_missing",
                f"the file {name!r} is nowhere in {self.folder}. Fetch it, or check "
                "benchmark_media.",
            )
        if len(ends) > 1:
            raise Refused(
                "media_ambiguous",
                f"{self.folder} holds several files {name!r}, such as {ends[0]} and {ends[1]}. "
                "Give the folder of the right one.",
            )
        return ends[0].absolute()

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        """Files by name, and videos by their names without suffix too."""
        found: dict[str, list[Path]] = {}
        for folder, _, names in os.walk(self.folder or self.unpacked):
            for name in names:
                path = Path(folder, name)
                keys = {name, name.lower()}
                if path.suffix.lower() in VIDEO_SUFFIXES:
                    keys.add(path.stem)
                for key in keys:
                    found.setdefault(key, []).append(path)
        return found


def _readable(path: Path) -> ImageFile:
    image = ImageFile(path)
    try:
        _ = image.size
    except MediaError as error:
        raise Refused("media_unreadable", str(error)) from error
    return image
