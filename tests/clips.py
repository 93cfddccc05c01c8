"""Small video files of numbered frames, and what can be read off a frame."""

import struct
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

STEP = 4


def frame_pixels(number: int, size: tuple[int, int]) -> np.ndarray:
    """Grey of ``STEP`` · number, but for a red quarter at the top left."""
    width, height = size
    pixels = np.full((height, width, 3), STEP * (number % 60), np.uint8)
    pixels[: height // 2, : width // 2] = [255, 0, 0]
    return pixels


def frame_numbers(frames: Iterable[np.ndarray]) -> list[float]:
    """Which frames of an upright clip these are."""
    return [float(f[f.shape[0] * 2 // 3 :, f.shape[1] * 2 // 3 :].mean()) / STEP for f in frames]


def red_corner(pixels: np.ndarray) -> tuple[str, str]:
    """Where the red quarter is."""
    red = pixels[..., 0].astype(int) - pixels[..., 1] > 100
    rows, columns = np.nonzero(red)
    middle = (red.shape[0] / 2, red.shape[1] / 2)
    return (
        "top" if rows.mean() < middle[0] else "bottom",
        "left" if columns.mean() < middle[1] else "right",
    )


def make_clip(
    path: Path,
    n: int = 20,
    times_s: Sequence[float] | None = None,
    fps: int = 10,
    size: tuple[int, int] = (96, 64),
    codec: str = "libx264",
    gop: int = 12,
    b_frames: int = 2,
    options: dict[str, str] | None = None,
) -> Path:
    """Writes n numbered frames, the next one shown after 1 / fps seconds or at ``times_s``."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        stream.codec_context.gop_size = gop
        stream.codec_context.max_b_frames = b_frames
        stream.codec_context.thread_count = 1
        stream.options = options or {}
        for number in range(n):
            frame = av.VideoFrame.from_ndarray(frame_pixels(number, size), format="rgb24")
            seconds = times_s[number] if times_s else number / fps
            frame.pts, frame.time_base = round(seconds * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def copy_packets(
    sources: Sequence[Path], path: Path, change: Callable[[int, av.Packet], bool] | None = None
) -> Path:
    """Copies the video streams of files into one, without decoding.

    Args:
        change: Told each packet of a stream and its number; false leaves it out.
    """
    options = {"avoid_negative_ts": "disabled", "movflags": "faststart"}
    with av.open(str(path), "w", options=options) as out:
        inputs = [av.open(str(source)) for source in sources]
        streams = [out.add_stream_from_template(i.streams.video[0]) for i in inputs]
        for container, stream in zip(inputs, streams, strict=True):
            packets = [p for p in container.demux(video=0) if p.size]
            for number, packet in enumerate(packets):
                if change is None or change(number, packet):
                    packet.stream = stream
                    out.mux(packet)
            container.close()
    return path


def repeated(source: Path, path: Path, times: int) -> Path:
    """Copies a file's video so often, one after the other, without decoding."""
    with av.open(str(path), "w") as out:
        stream = None
        for k in range(times):
            with av.open(str(source)) as container:
                video = container.streams.video[0]
                stream = stream or out.add_stream_from_template(video)
                for packet in container.demux(video):
                    if packet.size:
                        packet.pts += k * video.duration
                        packet.dts += k * video.duration
                        packet.stream = stream
                        out.mux(packet)
    return path


def with_matrix(path: Path, out: Path, matrix: tuple[int, int, int, int]) -> Path:
    """Copies an MP4 file and writes (a, b, c, d) of the display matrix into its track's header."""
    data = bytearray(path.read_bytes())
    header = data.index(b"tkhd")
    a, b, c, d = (value << 16 for value in matrix)
    data[header + 44 : header + 80] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    out.write_bytes(data)
    return out
