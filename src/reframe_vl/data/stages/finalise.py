"""Finalise: expands the evidence, once, and writes the calls that ask for it.

Expanded are boxes by 1.5 about their centre, clipped, and segments by one frame of the grid at both
ends; the evidence carries the version of these rules. Everything after this stage uses it and never
the annotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from reframe_vl.data.evidence import (
    EVIDENCE_VERSION,
    MAX_FRAMES,
    MIN_SIDE,
    applicability,
    box_coverage,
    expand_box,
)
from reframe_vl.data.record_parts import ToolCall
from reframe_vl.data.records import ExpandedEvidence, Record
from reframe_vl.data.stages.base import Outcome, Stage, decided
from reframe_vl.data.video_records import expand_segment_evidence, refuse_expanded
from reframe_vl.rewards.grounding import pairwise_iou
from reframe_vl.tools.base import Refusal, Scene, ToolRequest
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import Evidence, Modality

NAME = "finalise"
VERSION = "1"


@dataclass(frozen=True)
class FinaliseSettings:
    """What the calls have to keep to.

    Attributes:
        max_frames: The most frames of a segment's evidence, and of a call.
        min_side: The shortest side of a box that a call can ask for, in pixels.
        min_iou: Of each call's region with its item of the evidence, after rounding.
        frame: That the calls' boxes are written in.
    """

    max_frames: int = MAX_FRAMES
    min_side: float = MIN_SIDE
    min_iou: float = 0.95
    frame: CoordinateFrame = CoordinateFrame.GRID_1000

    def __post_init__(self) -> None:
        if self.frame is CoordinateFrame.PIXEL_FED:
            raise ValueError(
                "frame is pixel_fed: a record's calls hold for images fed at any size."
            )


def expand_evidence(record: Record, max_frames: int = MAX_FRAMES) -> Record:
    """Fills in expanded evidence, coverage and applicability.

    A record without boxes or segments, or without the size or grid that they need, stays without.

    Args:
        max_frames: A segment with more frames is subsampled, so that one call can ask for it.

    Raises:
        ValueError: The evidence is expanded already, or lies outside the media.
    """
    refuse_expanded(record)
    if record.modality is Modality.VIDEO:
        return record if record.media.facts is None else expand_segment_evidence(record, max_frames)
    size = record.media.size
    if not record.boxes or size is None:
        return record
    boxes = tuple(expand_box(box.xyxy, size) for box in record.boxes)
    coverage = box_coverage(boxes, size)
    return record.model_copy(
        update={
            "evidence": ExpandedEvidence(version=EVIDENCE_VERSION, boxes=boxes),
            "coverage": coverage,
            "applicability": applicability(coverage),
        }
    )


def finalise(records: Sequence[Record], settings: FinaliseSettings) -> list[Outcome]:
    """Expands each record, and drops those whose calls do not return their evidence.

    Raises:
        ValueError: A record is expanded already.
    """
    return [
        _finalised(expand_evidence(record, settings.max_frames), settings) for record in records
    ]


def _finalised(record: Record, settings: FinaliseSettings) -> Outcome:
    size = record.media.size
    if record.evidence is None or size is None:
        return decided(record, NAME, "kept", "no_evidence", "there is no evidence to expand")
    tool = CropImage() if record.modality is Modality.IMAGE else SelectFrames()
    evidence = Evidence(record.evidence.boxes, record.evidence.segments)
    # In the frames that are allowed the size at which the image is fed does not matter.
    scene = Scene(
        record.modality,
        size,
        size,
        settings.frame,
        record.media.timestamps_s,
        settings.min_side,
        settings.max_frames,
    )
    try:
        arguments = tool.canonical(evidence, scene)
    except ValueError as error:
        return decided(record, NAME, "dropped", "call_refused", str(error))
    requests = [tool.check(call, scene) for call in arguments]
    worst = min(_agreement(evidence, number, request) for number, request in enumerate(requests))
    if worst < settings.min_iou:
        note = (
            f"rounded to {settings.frame}, a call has an IoU of {worst:.3f} with its evidence, "
            f"below {settings.min_iou:g}: the evidence is too small for the image"
        )
        return decided(record, NAME, "dropped", "call_inexact", note)
    calls = tuple(ToolCall(name=tool.name, arguments=call) for call in arguments)
    record = record.model_copy(update={"tool_calls": calls})
    note = f"evidence expanded by rules {EVIDENCE_VERSION}, {len(calls)} calls, IoU {worst:.3f}"
    return decided(record, NAME, "kept", "", note)


def _agreement(evidence: Evidence, number: int, request: ToolRequest | Refusal) -> float:
    """The IoU of what a call returns with the item that it stands for."""
    assert isinstance(request, ToolRequest)
    if evidence.boxes:
        item = np.array([evidence.boxes[number]], np.float64)
        return float(pairwise_iou(np.array(request.boxes, np.float64), item)[0, 0])
    wanted, got = set(evidence.segments[number]), set(request.frames)
    return len(wanted & got) / len(wanted | got)


def finalise_stage(settings: FinaliseSettings) -> Stage:
    """The stage, ready to run."""
    config = asdict(settings) | {"frame": settings.frame.value}
    return Stage(NAME, VERSION, config, partial(finalise, settings=settings))
