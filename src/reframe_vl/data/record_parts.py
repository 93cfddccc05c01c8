"""The parts of a record, and the types of their numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from reframe_vl.data.video import GridRule, VideoFacts
from reframe_vl.types import AnswerKind, Box


def _ordered_box(box: Box) -> Box:
    x0, y0, x1, y1 = box
    if x0 >= x1 or y0 >= y1:
        raise ValueError("a box is [x0, y0, x1, y1] with x0 < x1 and y0 < y1")
    return box


def _ordered_segment(segment: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= segment[0] < segment[1]:
        raise ValueError("a segment is [start_s, end_s] with 0 <= start_s < end_s")
    return segment


def _ascending(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(a >= b for a, b in pairwise(numbers)):
        raise ValueError("the numbers must ascend, without repeats")
    return numbers


_LARGEST = 2**31 - 1
"""Of whole numbers: far above all real ones, and floats hold it."""

PositiveWhole = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegativeWhole = Annotated[int, Field(ge=0, le=_LARGEST)]
PixelBox = Annotated[Box, AfterValidator(_ordered_box)]
Seconds = Annotated[tuple[float, float], AfterValidator(_ordered_segment)]
Times = Annotated[tuple[float, ...], AfterValidator(_ascending)]
Frames = Annotated[tuple[NonNegativeWhole, ...], Field(min_length=1), AfterValidator(_ascending)]
NonEmpty = Annotated[str, Field(min_length=1)]


class RecordPart(BaseModel):
    """What all parts share: no unknown fields, no numbers that are not finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class MediaInfo(RecordPart):
    """The image or video asked about.

    Attributes:
        path: Absolute, or relative to the folder of the record file.
        width: Of the upright image or frame, in pixels; with ``height`` None where the source does
            not say and the media were not read yet.
        duration_s: Videos only, as is all that follows: when the last frame ends.
        fps: On average.
        n_frames: Of the file.
        grid: The rule by which the sample's frames were chosen.
        timestamps_s: When each of them is shown, in seconds since the start of the file.
    """

    path: NonEmpty
    width: PositiveWhole | None = None
    height: PositiveWhole | None = None
    duration_s: PositiveFloat | None = None
    fps: PositiveFloat | None = None
    n_frames: PositiveWhole | None = None
    grid: GridRule | None = None
    timestamps_s: Times = ()

    @model_validator(mode="after")
    def _both_sides(self) -> MediaInfo:
        if (self.width is None) != (self.height is None):
            raise ValueError("width and height belong together: give both, or neither")
        return self

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height); None where they are not known."""
        return None if self.width is None or self.height is None else (self.width, self.height)

    @property
    def facts(self) -> VideoFacts | None:
        """What is said of a video; None where not all of it is."""
        size = self.size
        if not (size and self.grid and self.timestamps_s and self.duration_s and self.n_frames):
            return None
        return VideoFacts(size, self.duration_s, self.n_frames, self.timestamps_s)


class AnswerInfo(RecordPart):
    """The reference answer; see ``types.Answer``."""

    kind: AnswerKind
    value: NonEmpty
    aliases: tuple[str, ...] = ()
    tolerance: Annotated[float, Field(ge=0)] = 0.0


class LabelledBox(RecordPart):
    """A box of the source's annotation, in absolute pixels.

    Attributes:
        label: What is in it, in the source's words.
        time_s: Videos only, and there always: when the boxed frame is shown.
        frame: Videos only: the source's own number of that frame.
    """

    xyxy: PixelBox
    label: str | None = None
    time_s: NonNegativeFloat | None = None
    frame: NonNegativeWhole | None = None


class ExpandedEvidence(RecordPart):
    """The evidence that everything but the builder uses (docs/method.md, 1.3).

    Attributes:
        version: The rules it was expanded by; ``evidence.EVIDENCE_VERSION``.
        segments: Frame indices on the sample's grid, ascending, those of one segment an item.
    """

    version: str
    boxes: tuple[PixelBox, ...] = ()
    segments: tuple[Frames, ...] = ()


class ToolCall(RecordPart):
    """A canonical call: it executes and returns an item of the evidence."""

    name: str
    arguments: dict[str, Any]


class AuditEntry(RecordPart):
    """What a pipeline stage did to the record.

    Attributes:
        verdict: What became of the record by it; None for a plain note.
        reason: A short code to count by.
        verifier: Who judged, such as a model's name; None where it is a rule of the stage.
    """

    stage: str
    note: str
    verdict: Literal["kept", "changed", "dropped"] | None = None
    reason: str | None = None
    verifier: str | None = None
