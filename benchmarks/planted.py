"""Records of the mini worlds for the data pipeline, sound ones and ones with planted faults."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from PIL import Image

from reframe_vl.data.pipeline import PipelineSettings
from reframe_vl.data.record_parts import AnswerInfo, LabelledBox, MediaInfo
from reframe_vl.data.records import Record
from reframe_vl.data.stages.diagnose import DiagnoseSettings
from reframe_vl.data.stages.looks import LookSettings
from reframe_vl.data.video import GridRule
from reframe_vl.mini.video_world import MiniVideo, MiniVideoWorld
from reframe_vl.mini.world import CANVAS_PX, SQUARE_PX, MiniImage, MiniWorld
from reframe_vl.types import RGB, Box, ImageMedia, Media, Modality, Sample, VideoMedia

SETTINGS = PipelineSettings(
    looks=LookSettings(128 * 128, 1024, image_glance_pixels=576, frame_glance_pixels=256),
    diagnose=DiagnoseSettings(scales=(0.5, 2.0), sides=(96, 1000)),
)
"""Budgets for canvases of 128 pixels and frames of 32; a glance at an image is below a policy's
first view, and at a video, which cannot be smaller, it is that view."""

MEANT = {
    "evaluation media": ("pool", "evaluation_media"),
    "duplicate": ("pool", "duplicate"),
    "near duplicate": ("pool", "near_duplicate"),
    "contradiction": ("pool", "answers_disagree"),
    "text-answerable": ("shortcut", "text_answerable"),
    "wrong box": ("audit", "evidence_unsupported"),
    "unsupported evidence": ("audit", "evidence_unsupported"),
    "wrong answer": ("audit", "answer_unsupported"),
    "too easy": ("audit", "too_easy"),
    "box on a resized frame": ("diagnose", "boxes_converted"),
    "two right options": ("diagnose", "ambiguous_options"),
}
"""Fault -> the stage that is meant to catch it, and its reason."""


@dataclass(frozen=True)
class CopiedImage(ImageMedia):
    """An image that was encoded anew: other bytes, nearly the same pixels."""

    original: ImageMedia

    @cached_property
    def key(self) -> str:
        return f"copy-{self.original.key}"

    @property
    def size(self) -> tuple[int, int]:
        return self.original.size

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        return _encoded(self.original.look(box, max_pixels))


@dataclass(frozen=True)
class CopiedVideo(VideoMedia):
    """A video that was encoded anew."""

    original: VideoMedia

    @cached_property
    def key(self) -> str:
        return f"copy-{self.original.key}"

    @property
    def size(self) -> tuple[int, int]:
        return self.original.size

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        return self.original.timestamps_s

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        return [_encoded(pixels) for pixels in self.original.look(frames, max_pixels)]


def _encoded(pixels: RGB) -> RGB:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return np.array(Image.open(stream))


@dataclass
class Planted:
    """A set of records with what is wrong with each.

    Attributes:
        faults: By record id; sound records have none.
        truth: The annotated box of each image before a fault was planted.
        held_out: Records of an evaluation.
    """

    records: list[Record]
    faults: dict[str, str]
    truth: dict[str, Box]
    media: dict[str, Media]
    held_out: list[Record]

    def open(self, record: Record) -> Media:
        """The media of a record."""
        return self.media[record.media.path]


def plant(num_sound: int, num_each: int, seed: int = 0) -> Planted:
    """Draws sound records and, for each fault, as many with it; half images, half videos.

    Faults that only images or only videos can have are planted in those alone.
    """
    made = Planted([], {}, {}, {}, [])
    rng = np.random.default_rng(seed)
    for index in range(num_sound):
        _add(made, _record(made, "sound", index, index % 2 == 1, seed, rng), None)
    for fault in MEANT:
        for index in range(num_each):
            _plant(made, fault, index, seed, rng)
    order = rng.permutation(len(made.records))
    # Of doubles the first stays: they must not come before what they repeat.
    made.records = [made.records[i] for i in sorted(order, key=lambda i: _is_double(made, i))]
    return made


def _is_double(made: Planted, index: int) -> bool:
    return made.faults.get(made.records[index].id, "") in ("duplicate", "near duplicate")


def _plant(made: Planted, fault: str, index: int, seed: int, rng: np.random.Generator) -> None:
    video = fault == "unsupported evidence" or (
        fault not in ("wrong box", "box on a resized frame") and index % 2 == 1
    )
    is_clean = fault == "too easy"
    choice = True if fault == "two right options" else None
    record = _record(made, fault, index, video, seed, rng, is_clean, choice)
    media = made.media[record.media.path]
    change: dict[str, object] = {}
    match fault:
        case "evaluation media":
            made.held_out.append(record.model_copy(update={"id": f"{record.id}/evaluation"}))
            change = {"media": _copied(made, record)}
        case "duplicate" | "near duplicate":
            _add(made, record, None)
            loud = f"{record.question[:-1].upper()} ?"
            change = {"id": f"{record.id}/again", "question": loud}
            if fault == "near duplicate":
                change |= {"media": _copied(made, record), "question": record.question}
        case "contradiction":
            _add(made, record, fault)
            change = {"id": f"{record.id}/again", "answer": _other_answer(record)}
        case "text-answerable":
            digit = _digit(record)
            hinted = f"{record.question[:-1]}, the one with the {digit} on it?"
            change = {"question": hinted}
        case "wrong box":
            assert isinstance(media, MiniImage)
            change = {"boxes": (LabelledBox(xyxy=_far_from(media, rng)),)}
        case "unsupported evidence":
            assert isinstance(media, MiniVideo)
            (other,) = media.events[1].segments
            change = {"segments": ((float(other[0]), float(other[-1] + 1)),)}
        case "wrong answer":
            change = {"answer": _other_answer(record)}
        case "box on a resized frame":
            scale = (0.5, 0.75)[index % 2]
            x0, y0, x1, y1 = (scale * v for v in record.boxes[0].xyxy)
            # Such boxes come from a source that drew them all so.
            change = {"boxes": (LabelledBox(xyxy=(x0, y0, x1, y1)),), "source": "mini_resized"}
        case "two right options":
            letter = (ord(record.answer.value) - ord("A") + 1) % 4
            options = list(record.options)
            right = options[ord(record.answer.value) - ord("A")]
            options[letter] = right
            # Whichever of the two a reader names counts as right.
            first = chr(ord("A") + options.index(right))
            change = {"options": tuple(options), "answer": AnswerInfo(kind="mcq", value=first)}
    _add(made, record.model_copy(update=change), fault)


def _add(made: Planted, record: Record, fault: str | None) -> None:
    made.records.append(record)
    if fault is not None:
        made.faults[record.id] = fault


def _record(
    made: Planted,
    stream: str,
    index: int,
    video: bool,
    seed: int,
    rng: np.random.Generator,
    is_clean: bool = False,
    choice: bool | None = None,
) -> Record:
    """A sound record of a scene; every second one is multiple choice.

    Args:
        is_clean: There is hardly any noise, so that a glance is enough.
    """
    world = (
        MiniVideoWorld(cue_strength=0.0, noise_std=0.02 if is_clean else 1.0, max_length=1)
        if video
        else MiniWorld(n_objects=3, cue_strength=0.0, noise_std=0.02 if is_clean else 0.8)
    )
    sample = world.sample(stream.replace(" ", "-"), index, seed)
    if stream == "box on a resized frame":
        # Near the top left corner a box is hardly moved by resizing.
        sample = _moved(sample, far=96.0)
    made.media[_path(sample)] = sample.media
    digit = sample.answer.value
    options: tuple[str, ...] = ()
    answer = AnswerInfo(kind="number", value=digit)
    if index // 2 % 2 if choice is None else choice:
        wrong = rng.permutation([str(d) for d in range(10) if str(d) != digit])[:3]
        options = tuple(map(str, rng.permutation([digit, *wrong])))
        answer = AnswerInfo(kind="mcq", value=chr(ord("A") + options.index(digit)))
    fields: dict[str, object] = {}
    assert sample.evidence is not None
    if video:
        runs = sample.evidence.segments
        fields["segments"] = tuple((float(run[0]), float(run[-1] + 1)) for run in runs)
    else:
        made.truth[sample.id] = sample.evidence.boxes[0]
        fields["boxes"] = (LabelledBox(xyxy=sample.evidence.boxes[0]),)
    return Record(
        id=sample.id,
        source=sample.source,
        split="train",
        licence="none",
        raw={},
        modality=sample.modality,
        media=_info(sample),
        question=sample.question,
        options=options,
        answer=answer,
        **fields,
    )


def _path(sample: Sample) -> str:
    return sample.id.replace("/", "-")


def _info(sample: Sample) -> MediaInfo:
    width, height = sample.media.size
    if sample.modality is Modality.IMAGE:
        return MediaInfo(path=_path(sample), width=width, height=height)
    assert isinstance(sample.media, VideoMedia)
    times = sample.media.timestamps_s
    return MediaInfo(
        path=_path(sample),
        width=width,
        height=height,
        duration_s=float(len(times)),
        fps=1.0,
        n_frames=len(times),
        grid=GridRule(1.0, len(times)),
        timestamps_s=times,
    )


def _moved(sample: Sample, far: float) -> Sample:
    """The scene with the square asked about in the bottom right corner."""
    image = sample.media
    assert isinstance(image, MiniImage)
    corner = int(far) * 8 // CANVAS_PX
    target = image.squares[0]
    swapped = tuple(
        replace(s, column=target.column, row=target.row)
        if (s.column, s.row) == (corner, corner)
        else s
        for s in image.squares[1:]
    )
    target = replace(target, column=corner, row=corner)
    assert sample.evidence is not None
    return replace(
        sample,
        media=replace(image, squares=(target, *swapped)),
        evidence=replace(sample.evidence, boxes=(target.box,)),
    )


def _copied(made: Planted, record: Record) -> MediaInfo:
    original = made.media[record.media.path]
    path = f"{record.media.path}-copy-{hashlib.sha256(record.id.encode()).hexdigest()[:4]}"
    made.media[path] = (
        CopiedVideo(original) if isinstance(original, VideoMedia) else CopiedImage(original)
    )
    return record.media.model_copy(update={"path": path})


def _digit(record: Record) -> str:
    if record.answer.kind == "mcq":
        return record.options[ord(record.answer.value) - ord("A")]
    return record.answer.value


def _other_answer(record: Record) -> AnswerInfo:
    if record.answer.kind == "mcq":
        letter = chr(ord("A") + (ord(record.answer.value) - ord("A") + 1) % len(record.options))
        return AnswerInfo(kind="mcq", value=letter)
    return AnswerInfo(kind="number", value=str((int(record.answer.value) + 1) % 10))


def _far_from(image: MiniImage, rng: np.random.Generator) -> Box:
    """A place for a square that does not touch the one asked about."""
    x, y, _, _ = image.squares[0].box
    places = [
        (float(left), float(top))
        for left in range(0, CANVAS_PX, SQUARE_PX)
        for top in range(0, CANVAS_PX, SQUARE_PX)
        if max(abs(left - x), abs(top - y)) > SQUARE_PX
    ]
    left, top = places[rng.integers(len(places))]
    return (left, top, left + SQUARE_PX, top + SQUARE_PX)
