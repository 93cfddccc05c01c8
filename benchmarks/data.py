"""The data module at full size: opening, memory, records a second, and decoding.

A record file of 100,000 records (63 % of images, 37 % of videos; 20,000 in a quick run) is opened a
first time, when every line is read and the header of every media file, and then by a fresh process
that has only what serves records, where it goes through all of them in a seeded order. Nothing is
decoded there. The data module of a training draws them once more, in a process with PyTorch.

Decoding is compared with what does it underneath, alone: images with Pillow, in one thread; frames
with decord2, which runs in a process of its own. Each file is read under a new name each time, so
that neither has seen it. Ratios are above 1 where this program is faster; of several rounds each
side's fastest counts, since other programs only ever slow them down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import common
import numpy as np
from PIL import Image

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.data.datamodule import record_data
from reframe_vl.data.decoded_images import DECODED
from reframe_vl.data.media import ImageFile
from reframe_vl.data.record_parts import AnswerInfo, LabelledBox, MediaInfo
from reframe_vl.data.records import Record, write_records
from reframe_vl.data.stages.finalise import expand_evidence
from reframe_vl.data.video import GridRule, VideoFile
from reframe_vl.data.video_decoder import VideoDecoder
from reframe_vl.data.video_records import video_info
from reframe_vl.types import Modality

IMAGE_SIZE, VIDEO_SIZE = (1024, 768), (640, 360)
VIDEO_FPS, VIDEO_SECONDS = 30, 12
FRAMES = 16
"""Frames that are fetched of a video, spread over it."""

SERVE = """
import sys, time
from reframe_vl.data.order import SeededOrder
from reframe_vl.data.record_source import RecordSource
def now():
    return time.perf_counter(), time.process_time()
start = now()
source = RecordSource(sys.argv[1])
opened = now()
order, size = SeededOrder(0), len(source)
for position in range(size):
    source[order.index(position, size)]
done = now()
open_s, open_cpu_s = (b - a for a, b in zip(start, opened))
seconds, cpu_s = (b - a for a, b in zip(opened, done))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
resident, mapped = (int(status[key].split()[0]) / 1024 for key in ("VmRSS", "RssFile"))
print(size, open_s, open_cpu_s, size / seconds, size / cpu_s, resident, mapped)
"""

DECORD = """
import sys, time
import decord
print("ready", flush=True)
for line in sys.stdin:
    path, count = line.rstrip().rsplit("|", 1)
    start = time.perf_counter()
    reader = decord.VideoReader(path)
    wanted = [round((i + 0.5) * len(reader) / int(count) - 0.5) for i in range(int(count))]
    frames = reader.get_batch(wanted).asnumpy()
    print(time.perf_counter() - start, frames.shape[0], flush=True)
"""


# --------------------------------------------------------------------------- serving records


def serving(folder: Path, num_records: int) -> list[dict[str, Any]]:
    """Rows of opening and drawing."""
    image, clip = folder / "image.jpg", folder / "clip.mp4"
    write_image(image, np.random.default_rng(0))
    write_clip(clip)
    file = folder / "records.jsonl"
    write_records(file, records(folder, image, clip, num_records))
    start = time.perf_counter()
    data = record_data(str(file), None, 64, "raise", 0)
    first_s = time.perf_counter() - start
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(file)],
        env={**os.environ, "PYTHONPATH": str(common.ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    size, open_s, open_cpu_s, per_s, per_cpu_s, resident_mb, mapped_mb = map(
        float, done.stdout.split()
    )
    assert size == num_records
    before_mb = resident()
    start = time.perf_counter()
    for _ in range(0, num_records, 32):
        data.coming_samples(32)
        data.advance(32)
    training_per_s = num_records / (time.perf_counter() - start)
    return [
        row("records", num_records, ""),
        row("record file", file.stat().st_size / 2**20, "MiB"),
        row("open, first time", first_s, "s"),
        row("open", open_s, "s"),
        row("open, processor time", open_cpu_s, "s"),
        row("resident, after all records", resident_mb, "MiB"),
        row("of that, mapped files", mapped_mb, "MiB"),
        row("records drawn", per_s, "1/s"),
        row("records drawn, by processor time", per_cpu_s, "1/s"),
        row("records drawn by the data module", training_per_s, "1/s"),
        row("added to a training's memory by that", resident() - before_mb, "MiB"),
    ]


def records(folder: Path, image: Path, clip: Path, number: int) -> Iterator[Record]:
    """Records of many names of two files; three questions or so a name."""
    rng = np.random.default_rng(1)
    info = video_info(clip, GridRule())
    for index in range(number):
        is_video = index % 100 >= 63
        medium = index // (60 if is_video else 3)
        path = folder / f"{medium}{clip.suffix if is_video else image.suffix}"
        if not path.exists():
            os.link(clip if is_video else image, path)
        record = Record(
            id=f"record/{index}",
            source=("nextgqa" if is_video else "visual_cot"),
            split="train",
            licence="none",
            raw={"question": "What is there?", "boxes": [[1, 2, 3, 4]] * 3, "note": "x" * 200},
            modality=Modality.VIDEO if is_video else Modality.IMAGE,
            media=media(path, info if is_video else None),
            question=f"What does the person near the {index % 977}th door hold in the left hand?",
            options=("a cup", "a lamp", "a book", "a phone", "nothing"),
            answer=AnswerInfo(kind="mcq", value="ABCDE"[index % 5]),
            boxes=() if is_video else (_box(rng),),
            segments=((1.5, 3.0), (5.0, 7.25)) if is_video else (),
        )
        yield expand_evidence(record)


def media(path: Path, info: MediaInfo | None) -> MediaInfo:
    """What a record says of a file."""
    if info is not None:
        return info.model_copy(update={"path": str(path)})
    return MediaInfo(path=str(path), width=IMAGE_SIZE[0], height=IMAGE_SIZE[1])


def _box(rng: np.random.Generator) -> LabelledBox:
    x, y = rng.uniform(0, 800), rng.uniform(0, 600)
    return LabelledBox(xyxy=(x, y, x + 120, y + 90))


def resident() -> float:
    """Memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# --------------------------------------------------------------------------- decoding


def decoding_images(folder: Path, num_files: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of whole images as arrays, this program's and Pillow's."""
    rng = np.random.default_rng(2)
    paths = [folder / f"decode{number}.jpg" for number in range(num_files)]
    for path in paths:
        write_image(path, rng)

    def ours(path: Path) -> None:
        DECODED.clear()
        ImageFile(path).look(None, 10**9)

    def pillow(path: Path) -> None:
        with Image.open(path) as image:
            np.array(image.convert("RGB"))

    own_s, alone_s = compared([(lambda p=p: ours(p), lambda p=p: pillow(p)) for p in paths], rounds)
    return [
        row("images decoded", num_files / own_s, "1/s"),
        row("images decoded by Pillow alone", num_files / alone_s, "1/s"),
        row("image decode ratio", alone_s / own_s, ""),
    ]


def compared(
    calls: Sequence[tuple[Callable[[], None], Callable[[], None]]], rounds: int
) -> tuple[float, float]:
    """Processor seconds of both sides: the fastest round of each call, summed."""
    best = np.full((len(calls), 2), np.inf)
    for _ in range(rounds):
        for number, pair in enumerate(calls):
            for side, call in enumerate(pair):
                start = time.process_time()
                call()
                best[number, side] = min(best[number, side], time.process_time() - start)
    own_s, alone_s = best.sum(0)
    return float(own_s), float(alone_s)


def fetching_frames(folder: Path, num_files: int, rounds: int, python: str) -> list[dict[str, Any]]:
    """Rows of frames of a video as arrays, this program's and decord2's."""
    clips = [folder / f"fetch{number}.mp4" for number in range(num_files)]
    for number, clip in enumerate(clips):
        write_clip(clip, seed=number)
    peer = subprocess.Popen(
        [python, "-c", DECORD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdout.readline()
    best = np.full((num_files, 2), np.inf)
    with VideoDecoder(store_bytes=0) as decoder:
        for round_ in range(rounds):
            for number, clip in enumerate(clips):
                # A new name, so that no index of the file is known.
                path = clip.with_name(f"{clip.stem}-{round_}.mp4")
                os.link(clip, path)
                facts = VideoFile(clip, GridRule(FRAMES / VIDEO_SECONDS, FRAMES)).facts
                start = time.perf_counter()
                frames = decoder.frames(path, facts.timestamps_s, VIDEO_SIZE)
                best[number, 0] = min(best[number, 0], time.perf_counter() - start)
                peer.stdin.write(f"{path}|{FRAMES}\n")
                peer.stdin.flush()
                seconds, count = peer.stdout.readline().split()
                assert int(count) == len(frames) == FRAMES
                best[number, 1] = min(best[number, 1], float(seconds))
    peer.stdin.close()
    peer.wait()
    own_s, alone_s = (float(seconds) for seconds in best.sum(0))
    fetched = num_files * FRAMES
    return [
        row("frames fetched", fetched / own_s, "1/s"),
        row("frames fetched by decord2 alone", fetched / alone_s, "1/s"),
        row("video fetch ratio", alone_s / own_s, ""),
    ]


# --------------------------------------------------------------------------- media


def picture(size: tuple[int, int], rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Soft shapes with some noise, about as hard to encode as a photograph."""
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    smooth = np.array(coarse.resize(size, Image.Resampling.BICUBIC)).astype(np.float64)
    return np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def write_image(path: Path, rng: np.random.Generator) -> None:
    """A JPEG."""
    Image.fromarray(picture(IMAGE_SIZE, rng)).save(path, quality=90)


def write_clip(path: Path, seed: int = 0) -> None:
    """H.264 with reordered frames and a key frame every two seconds."""
    rng = np.random.default_rng(seed)
    wide = picture((VIDEO_SIZE[0] * 2, VIDEO_SIZE[1]), rng)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", VIDEO_FPS, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = *VIDEO_SIZE, "yuv420p"
        stream.codec_context.gop_size = 2 * VIDEO_FPS
        for number in range(VIDEO_FPS * VIDEO_SECONDS):
            left = number % VIDEO_SIZE[0]
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(wide[:, left : left + VIDEO_SIZE[0]])
            )
            frame.pts, frame.time_base = number, Fraction(1, VIDEO_FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def row(what: str, value: float, unit: str) -> dict[str, Any]:
    """A row of the report."""
    return {"what": what, "value": value, "unit": unit}


def main() -> None:
    """Measures and reports."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument(
        "--decord-python", default=sys.executable, help="an interpreter that has decord2"
    )
    args = parser.parse_args()
    num_records, num_files, rounds = (20_000, 8, 3) if args.quick else (100_000, 24, 7)
    with tempfile.TemporaryDirectory() as folder:
        rows = serving(Path(folder), num_records)
        rows += decoding_images(Path(folder), num_files, rounds)
        rows += fetching_frames(Path(folder), num_files // 4, rounds, args.decord_python)
    value = {row["what"]: row["value"] for row in rows}
    summary = {
        "open_s": value["open"],
        "resident_mb": value["resident, after all records"],
        "records_per_s": value["records drawn by the data module"],
        "image_decode_ratio": value["image decode ratio"],
        "video_fetch_ratio": value["video fetch ratio"],
    }
    content = common.report(rows, summary)
    common.show(rows, "data")
    common.show([summary], "summary")
    file = args.json or (None if args.quick else common.RESULTS / "data.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("data", "The data module at full size", __doc__ or "", content)


if __name__ == "__main__":
    main()
