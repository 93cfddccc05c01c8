"""Images read from files, always as upright 8-bit RGB.

One rule for every format, applied in this order:

1. Animated files (GIF, WebP, APNG): the first frame.
2. EXIF orientation is applied once; sizes and boxes are always those of the upright image.
3. Conversion to 8 bits a channel (``to_rgb``):

    ==================  =========================================================================
    L, 1, YCbCr, CMYK   Pillow's conversion. CMYK JPEGs are read in Adobe's (inverted) convention.
    transparency        LA, RGBA, PA, or a transparent palette entry or colour: laid over white.
    I;16                value / 257, so that 65535 becomes 255; never stretched to its contents.
    I                   as I;16 if all values fit in 16 bits, else stretched from least to greatest.
    F                   times 255 if all values are in 0-1, as it is if all are in 0-255, else
                        stretched. Values that are not finite are 0.
    ==================  =========================================================================

Pillow's limit on the number of pixels (its guard against decompression bombs) stays as it is.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from reframe_vl.data.decoded_images import DECODED
from reframe_vl.types import RGB, Box, ImageMedia

logger = logging.getLogger(__name__)

_ROUNDING = 1e-6
"""An edge this close to a whole pixel is on it: sums of floats are not exact."""

_REDUCING_GAP = 3.0
"""Large reductions first average whole pixels down to this many times the wanted size."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_EXIF_ERRORS = (SyntaxError, ValueError, KeyError, IndexError, TypeError, struct.error)
# What Pillow's readers raise on damaged files.
_DECODE_ERRORS = (*_EXIF_ERRORS, OSError, EOFError, OverflowError, zlib.error)
_BOMB_ERRORS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


class MediaError(RuntimeError):
    """A media file that cannot be read; the message names the file and the remedy."""


@dataclass(frozen=True)
class _Header:
    size: tuple[int, int]
    orientation: int
    reducible: bool
    version: tuple[int, int]


@dataclass(frozen=True)
class ImageFile(ImageMedia):
    """An image in a file, read when it is first looked at.

    The file must not change while an ``ImageFile`` of it is in use.

    Attributes:
        known: The size that a record says it has. With it nothing is read before the first look,
            and a look at a file of another size fails.
    """

    path: Path
    known: tuple[int, int] | None = None

    @cached_property
    def key(self) -> str:
        """The start of the SHA-256 of the file's bytes."""
        return file_key(self.path)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright image; read from the file's header, or known."""
        return self.known or self._header.size

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        """Returns the whole image (None) or a region of it, reduced to at most ``max_pixels``.

        The result depends on the arguments and the file alone, never on what was looked at before.

        Args:
            box: In pixels of the upright image; its edges move outwards to whole pixels and are
                clipped to the image.
            max_pixels: The region is never enlarged to reach it.

        Raises:
            MediaError: The file cannot be read.
            ValueError: The box is empty, not finite, or outside the image.
        """
        header = self._header
        whole = (0, 0, *header.size)
        region = whole if box is None else pixel_region(box, header.size)
        region_size = (region[2] - region[0], region[3] - region[1])
        target = reduced_size(region_size, max_pixels)
        reduction = _jpeg_reduction(region_size, target) if header.reducible else 1
        image = DECODED.get(
            (str(self.path), header.version, reduction),
            lambda: _decode(self.path, header.orientation, reduction),
        )
        if target == region_size:
            return np.array(image if region == whole else image.crop(region))
        x_scale, y_scale = image.width / header.size[0], image.height / header.size[1]
        x0, y0 = region[0] * x_scale, region[1] * y_scale
        x1, y1 = min(region[2] * x_scale, image.width), min(region[3] * y_scale, image.height)
        # Cropped first: a filter must not draw in pixels from outside the region.
        part = (math.floor(x0), math.floor(y0), math.ceil(x1), math.ceil(y1))
        return np.array(
            image.crop(part).resize(
                target,
                Image.Resampling.BICUBIC,
                box=(x0 - part[0], y0 - part[1], x1 - part[0], y1 - part[1]),
                reducing_gap=_REDUCING_GAP,
            )
        )

    @cached_property
    def _header(self) -> _Header:
        with _opened(self.path) as image:
            stat = self.path.stat()
            orientation = _orientation(image, self.path)
            width, height = image.size[::-1] if orientation >= 5 else image.size
            if self.known not in (None, (width, height)):
                raise MediaError(
                    f"{self.path}: the upright image has {width}x{height} pixels, its record says "
                    f"{self.known}: it is another file. Fetch the one that the record was made "
                    "from, or make the record again."
                )
            return _Header(
                size=(width, height),
                orientation=orientation,
                reducible=image.format in ("JPEG", "MPO"),
                version=(stat.st_mtime_ns, stat.st_size),
            )


def file_key(path: Path) -> str:
    """The start of the SHA-256 of a media file's bytes.

    Raises:
        MediaError: The file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:32]
    except OSError as error:
        raise MediaError(unreadable(path, error)) from error


def file_version(path: Path) -> list[int] | None:
    """Another one when a file was written or replaced, without reading it; None where none is.

    The time of the last change of status is in it: the time of writing is set by what unpacks or
    copies a file, and may be that of the file which was there before.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def pixel_region(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Moves a box's edges outwards to whole pixels and clips them to the image.

    Raises:
        ValueError: The box is empty, not finite, or outside the image.
    """
    x0, y0, x1, y1 = box
    if not (all(map(math.isfinite, box)) and x0 < x1 and y0 < y1):
        raise ValueError(
            f"The box {box} holds no pixels: give finite x0 < x1 and y0 < y1, x first."
        )
    width, height = size
    region = (
        max(0, math.floor(x0 + _ROUNDING)),
        max(0, math.floor(y0 + _ROUNDING)),
        min(width, math.ceil(x1 - _ROUNDING)),
        min(height, math.ceil(y1 - _ROUNDING)),
    )
    if region[0] >= region[2] or region[1] >= region[3]:
        raise ValueError(
            f"The box {box} has no pixel in common with the image of {width}x{height} pixels: "
            "give it in pixels of the original upright image."
        )
    return region


def reduced_size(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    """The largest size of about the same shape with at most ``max_pixels``; never larger.

    Very thin images keep one pixel of their short side and lose more of the long one.
    """
    if max_pixels < 1:
        raise ValueError(f"max_pixels is {max_pixels}: a picture needs at least one pixel.")
    width, height = size
    if width * height <= max_pixels:
        return size
    scale = math.sqrt(max_pixels / (width * height))
    new_width, new_height = max(1, int(width * scale)), max(1, int(height * scale))
    if new_width == 1:
        new_height = min(new_height, max_pixels)
    if new_height == 1:
        new_width = min(new_width, max_pixels)
    return (new_width, new_height)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to 8-bit RGB by the rules in this module's header."""
    if image.mode.startswith("I;16"):
        return _grey(np.asarray(image) / 257)
    if image.mode == "I":
        values = np.asarray(image).astype(np.float64)
        in_16_bits = values.min() >= 0 and values.max() <= 65535
        return _grey(values / 257 if in_16_bits else _stretched(values))
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0, neginf=0)
        if values.min() < 0 or values.max() > 255:
            return _grey(_stretched(values))
        return _grey(values * 255 if values.max() <= 1 else values)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _grey(values: npt.NDArray[np.float64]) -> Image.Image:
    return Image.fromarray(np.rint(values).astype(np.uint8)).convert("RGB")


def _stretched(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = values.min(), values.max()
    return (values - low) * 255 / (high - low) if high > low else np.zeros_like(values)


def _decode(path: Path, orientation: int, reduction: int) -> Image.Image:
    with _opened(path) as stored:
        if reduction > 1:
            stored.draft(None, (stored.width // reduction, stored.height // reduction))
        stored.load()
        upright = stored.transpose(_UPRIGHT[orientation]) if orientation > 1 else stored
        return to_rgb(upright)


def _jpeg_reduction(size: tuple[int, int], target: tuple[int, int]) -> int:
    """By how much a JPEG is reduced as it is decoded; twice the wanted size is left to filter."""
    ratio = min(size[0] / target[0], size[1] / target[1])
    return next((factor for factor in (8, 4, 2) if ratio >= 2 * factor), 1)


def _orientation(image: Any, path: Path) -> int:
    if image.format == "TIFF":  # Pillow turns these upright itself.
        return 1
    try:
        if image.format == "PNG" and not _has_text_after_pixels(path):
            # Pillow's own method for PNG decodes the pixels, to read what may come after them.
            exif = Image.Image.getexif(image)
        else:
            exif = image.getexif()
        value = exif.get(ExifTags.Base.Orientation)
    except _EXIF_ERRORS as error:
        logger.warning("%s: its EXIF data are damaged (%s): taken as upright.", path, error)
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def _has_text_after_pixels(png: Path) -> bool:
    after_pixels = False
    with png.open("rb") as stream:
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            if name == b"IDAT":
                after_pixels = True
            elif after_pixels and name in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            stream.seek(length + 4, os.SEEK_CUR)
    return False


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with Image.open(path) as image:
            limit = Image.MAX_IMAGE_PIXELS
            # Between one and two limits Pillow only warns.
            if limit is not None and image.width * image.height > limit:
                raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels")
            yield image
    except _BOMB_ERRORS as error:
        raise MediaError(
            f"{path}: the image is larger than the limit of {Image.MAX_IMAGE_PIXELS} pixels that "
            f"guards against decompression bombs ({error}). Reduce the file (and the boxes that "
            "belong to it) with an image tool, or leave it out."
        ) from error
    except _DECODE_ERRORS as error:
        raise MediaError(unreadable(path, error)) from error


def unreadable(path: Path, error: Exception) -> str:
    """Says that a media file cannot be read, and what to do."""
    if isinstance(error, FileNotFoundError):
        return f"{path}: there is no such file. Check the media folder and the record's path."
    return (
        f"{path}: the file cannot be read ({type(error).__name__}: {error}). It may be truncated "
        "or of an unknown format: fetch it again, or leave its rows out."
    )
