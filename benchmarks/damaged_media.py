"""Images and videos damaged at random: each is read as a picture, or refused with a reason.

Small files of many formats are damaged in five ways: cut off, some bytes changed, a piece removed,
a piece repeated, or a piece overwritten with noise. Each is then read as a source reads it: an
image in full and in part, a video through its whole grid. What is neither read nor refused with a
``MediaError`` that names the file is counted under "other", as is what takes over a minute.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import common
import numpy as np
from PIL import Image

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.video import GridRule
from reframe_vl.data.video_records import video_info

DEADLINE_S = 60.0
"""Far above what such a small file takes on a busy machine."""

IMAGES = {
    "jpg": {"quality": 90},
    "jpeg": {"quality": 80, "progressive": True},
    "png": {},
    "gif": {"save_all": True},
    "webp": {"quality": 80},
    "tif": {"compression": "tiff_lzw"},
    "tiff": {},
    "bmp": {},
}
VIDEOS = {
    "mp4": "libx264",
    "mkv": "libx264",
    "mov": "mpeg4",
    "webm": "libvpx",
    "ts": "libx264",
    "avi": "mpeg4",
}


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """The bytes of a file after something happened to it."""
    size = len(content)
    at, length = int(rng.integers(size)), int(rng.integers(1, max(2, size // 4)))
    match int(rng.integers(5)):
        case 0:
            return content[:at]
        case 1:
            changed = np.frombuffer(content, np.uint8).copy()
            # Headers stand in front: damage there is what readers trip over.
            reach = size if rng.random() < 0.5 else min(size, 200)
            where = rng.integers(0, reach, int(rng.integers(1, 30)))
            changed[where] = rng.integers(0, 256, len(where))
            return changed.tobytes()
        case 2:
            return content[:at] + content[at + length :]
        case 3:
            return content[: at + length] + content[at:]
        case _:
            return content[:at] + rng.bytes(length) + content[at + length :]


def look_at_image(path: Path) -> None:
    """Reads an image as sources and tools do."""
    image = ImageFile(path)
    width, height = image.size
    pixels = image.look(None, 10**6)
    assert pixels.shape[2] == 3 and pixels.dtype == np.uint8
    image.look((0, 0, max(1, width // 2), max(1, height // 2)), 1000)


def look_at_video(path: Path) -> None:
    """Reads a video as sources do: every frame of its grid."""
    info = video_info(path, GridRule(4, 8))
    assert info.timestamps_s and info.duration_s


def write_image(path: Path, rng: np.random.Generator, settings: dict[str, Any]) -> None:
    """Soft shapes and noise."""
    size = (int(rng.integers(40, 120)), int(rng.integers(40, 120)))
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
    picture = coarse.resize(size, Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = int(rng.integers(1, 9))
    given = dict(settings)
    if path.suffix in (".jpg", ".jpeg", ".png", ".webp"):
        given["exif"] = exif
    if given.get("save_all"):
        given["append_images"] = [picture.rotate(90), picture.rotate(180)]
    picture.save(path, **given)


def write_video(path: Path, rng: np.random.Generator, codec: str) -> None:
    """Two seconds of moving noise."""
    wide = rng.integers(0, 256, (16, 64, 3), np.uint8).repeat(4, 0).repeat(4, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, 12)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.codec_context.gop_size = 8
        for number in range(24):
            pixels = np.ascontiguousarray(wide[:, number * 4 : number * 4 + 96])
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts, frame.time_base = number, Fraction(1, 12)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def tried(look: Callable[[Path], None], path: Path) -> tuple[str, float]:
    """What became of a file, and the seconds it took."""
    start = time.perf_counter()
    try:
        look(path)
        outcome = "read"
    except MediaError as error:
        outcome = "refused" if path.name in str(error) else "refused without its name"
    except Exception as error:  # Whatever else it raises is what is looked for.
        outcome = f"crashed ({type(error).__name__}: {error})"
        print(f"{path}: {outcome}", file=sys.stderr)
    seconds = time.perf_counter() - start
    return (outcome if seconds < DEADLINE_S else "too slow"), seconds


def measure(folder: Path, each: int, seed: int = 0) -> list[dict[str, Any]]:
    """A row a format."""
    rows = []
    for suffix, how in (*IMAGES.items(), *VIDEOS.items()):
        rng = np.random.default_rng([seed, len(rows)])
        outcomes: Counter[str] = Counter()
        slowest = 0.0
        whole = folder / f"whole.{suffix}"
        for number in range(each):
            path = folder / f"{number}.{suffix}"
            if isinstance(how, str):
                if number == 0:
                    write_video(whole, rng, how)
                look = look_at_video
            else:
                write_image(whole, rng, how)
                look = look_at_image
            path.write_bytes(damaged(whole.read_bytes(), rng))
            outcome, seconds = tried(look, path)
            outcomes[outcome] += 1
            slowest = max(slowest, seconds)
        rows.append(
            {
                "format": suffix,
                "files": each,
                "read": outcomes["read"],
                "refused": outcomes["refused"],
                "other": each - outcomes["read"] - outcomes["refused"],
                "slowest_s": slowest,
            }
        )
    return rows


def main() -> None:
    """Measures and reports."""
    args = common.arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), 4 if args.quick else 36)
    summary = {
        name: sum(row[name] for row in rows) for name in ("files", "read", "refused", "other")
    } | {"slowest_s": max(row["slowest_s"] for row in rows)}
    content = common.report(rows, summary)
    common.show(rows, "damaged media")
    common.show([summary], "summary")
    file = args.json or (None if args.quick else common.RESULTS / "damaged_media.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("damaged_media", "Damaged media", __doc__ or "", content)


if __name__ == "__main__":
    main()
