"""The record: one question of a data set, one line of a JSON-lines file.

A record keeps the source's row verbatim beside what was made of it. Boxes are absolute pixels of
the original upright image, half-open, x first; segments are seconds, half-open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.media import ImageFile
from reframe_vl.data.record_parts import (
    AnswerInfo,
    AuditEntry,
    ExpandedEvidence,
    LabelledBox,
    MediaInfo,
    NonEmpty,
    RecordPart,
    Seconds,
    ToolCall,
)
from reframe_vl.data.report import Problem, Report
from reframe_vl.data.text_files import iter_json_lines
from reframe_vl.data.video import VideoFile
from reframe_vl.types import Answer, Applicability, Evidence, Media, Modality, Sample

__all__ = [
    "AnswerInfo",
    "AuditEntry",
    "ExpandedEvidence",
    "LabelledBox",
    "MediaInfo",
    "Record",
    "Seconds",
    "ToolCall",
    "describe",
    "iter_records",
    "parsed_lines",
    "read_records",
    "write_records",
]


class Record(RecordPart):
    """One question about one image or video, with everything known about it.

    Attributes:
        raw: The source's row, verbatim.
        boxes: The annotation in absolute pixels, not yet expanded. Those of a video are kept for
            reference: its evidence are its segments.
        native_encoding: How the source writes boxes or segments, in words.
        evidence: None where the source has none.
        coverage: The share of the whole that the expanded evidence takes up.
        tool_calls: Canonical calls, in annotation order.
        audit: What was done to the record, in order.
    """

    schema_version: Literal[1] = 1
    id: NonEmpty
    source: NonEmpty
    split: NonEmpty
    licence: NonEmpty
    raw: dict[str, Any]
    modality: Modality
    media: MediaInfo
    question: NonEmpty
    options: tuple[str, ...] = ()
    answer: AnswerInfo
    boxes: tuple[LabelledBox, ...] = ()
    segments: tuple[Seconds, ...] = ()
    native_encoding: str = ""
    evidence: ExpandedEvidence | None = None
    coverage: Annotated[float, Field(ge=0, le=1)] | None = None
    applicability: Applicability | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    audit: tuple[AuditEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if self.modality is Modality.IMAGE and self.segments:
            raise ValueError("an image has no segments: remove them or set modality to video")
        if self.modality is Modality.IMAGE and self.media.grid:
            raise ValueError("an image has no grid of frames: remove media.grid")
        timed = [box.time_s is not None for box in self.boxes]
        if self.modality is Modality.VIDEO and not all(timed):
            raise ValueError(
                "a video has no boxes without a time: give time_s, or set modality to image"
            )
        if self.modality is Modality.IMAGE and any(timed):
            raise ValueError("an image has no times: remove time_s of its boxes")
        letters = [chr(ord("A") + index) for index in range(len(self.options))]
        if self.answer.kind == "mcq" and self.answer.value not in letters:
            raise ValueError(
                f"answer.value of a multiple-choice question is an option's letter, one of "
                f"{letters}, not {self.answer.value!r}"
            )
        return self

    def sample_problem(self) -> tuple[str, str] | None:
        """Says why the record cannot be a sample: (reason, message), or None."""
        if self.modality is Modality.VIDEO and self.media.facts is None:
            return (
                "grid_missing",
                "media.grid, timestamps_s, duration_s, n_frames: a video needs all of them. Make "
                "the record with `reframe_vl.data.video_records.video_record`.",
            )
        if (self.boxes or self.segments) and self.evidence is None:
            return (
                "evidence_missing",
                "evidence: it has boxes or segments but no expanded evidence. Build the file with "
                "`python src/build_data.py` and the folder of the media.",
            )
        if self.evidence is not None and self.evidence.version != EVIDENCE_VERSION:
            return (
                "evidence_version",
                f"evidence.version: its evidence was expanded by rules {self.evidence.version!r}, "
                f"not {EVIDENCE_VERSION!r}: build the file again with `python src/build_data.py`.",
            )
        if self.evidence is not None and self.evidence.boxes and self.modality is Modality.VIDEO:
            return (
                "evidence_off_grid",
                "evidence.boxes: the evidence of a video is its segments: make the record again.",
            )
        if self.evidence is not None and self.evidence.segments and self.modality is Modality.IMAGE:
            return (
                "evidence_off_grid",
                "evidence.segments: the evidence of an image is its boxes: make the record again.",
            )
        count = len(self.media.timestamps_s)
        for number, segment in enumerate(self.evidence.segments if self.evidence else ()):
            if segment[-1] >= count:
                return (
                    "evidence_off_grid",
                    f"evidence.segments.{number}: it has frame {segment[-1]}, but the grid of "
                    f"media.timestamps_s has {count}, counted from 0: make the record again.",
                )
        return None

    def to_sample(self, root: Path) -> Sample:
        """Makes the sample that the rest of the program works with.

        Args:
            root: The folder of the record file.

        Raises:
            ValueError: ``sample_problem`` finds something.
        """
        odd = self.sample_problem()
        if odd is not None:
            raise ValueError(f"Record {self.id}: {odd[1]}")
        evidence = None
        if self.evidence is not None:
            evidence = Evidence(self.evidence.boxes, self.evidence.segments)
        return Sample(
            id=self.id,
            modality=self.modality,
            media=self._media(root),
            question=self.question,
            answer=Answer(**dict(self.answer)),
            options=self.options,
            evidence=evidence,
            applicability=self.applicability,
            source=self.source,
            split=self.split,
        )

    def _media(self, root: Path) -> Media:
        path, facts, rule = root / self.media.path, self.media.facts, self.media.grid
        if facts is None or rule is None:
            return ImageFile(path, self.media.size)
        return VideoFile(path, rule, facts)


# --------------------------------------------------------------------------- files


def parsed_lines(path: Path) -> Iterator[tuple[int, Record | Problem]]:
    """Yields (line number, record) of each line, or why it is none."""
    seen: set[str] = set()
    for number, line in iter_json_lines(path):
        where = f"{path}, line {number}"
        try:
            record = Record.model_validate_json(line)
        except ValidationError as error:
            message = (
                f"{describe(error)}. Mend the line, or build the file again with "
                "`python src/build_data.py`."
            )
            yield number, Problem(where, "bad_record", message)
            continue
        if record.id in seen:
            message = (
                f"the id {record.id!r} stands in an earlier line too. Give each record its own "
                "id: random draws depend on it."
            )
            yield number, Problem(where, "duplicate_id", message)
            continue
        seen.add(record.id)
        yield number, record


def iter_records(path: Path, report: Report) -> Iterator[Record]:
    """Reads records one by one; rows that cannot be read go to the report."""
    for _, record in parsed_lines(path):
        if isinstance(record, Problem):
            report.add(record)
        else:
            report.num_kept += 1
            yield record


def read_records(
    path: Path, on_error: Literal["raise", "skip"] = "raise", report: Report | None = None
) -> list[Record]:
    """Reads a record file.

    Args:
        on_error: ``raise`` stops at the first bad line; ``skip`` logs and reports it.
        report: With ``skip``: where bad lines are noted.

    Raises:
        RecordError: A line is no valid record, with ``raise``.
    """
    if on_error == "raise":
        report = Report(strict=True)
    return list(iter_records(path, report or Report()))


def write_records(path: Path, records: Iterable[Record]) -> int:
    """Writes a record file whole or not at all; returns the number of records.

    Media below the file's folder are named relative to it, so that the folder can be moved.
    """
    folder = path.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{path.name}.{os.getpid()}.part"
    number = 0
    try:
        with part.open("wb") as stream:
            for record in records:
                stream.write(_with_relative_media(record, folder).model_dump_json().encode())
                stream.write(b"\n")
                number += 1
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return number


def _with_relative_media(record: Record, folder: Path) -> Record:
    media = Path(record.media.path)
    if not media.is_absolute() or not media.is_relative_to(folder):
        return record
    relative = media.relative_to(folder).as_posix()
    return record.model_copy(update={"media": record.media.model_copy(update={"path": relative})})


def describe(error: ValidationError) -> str:
    """Says in one line what is wrong with which fields of a row."""
    parts = []
    for item in error.errors():
        field = ".".join(map(str, item["loc"]))
        value = (
            "" if item["type"] in ("missing", "json_invalid") else f" (found {item['input']!r:.80})"
        )
        parts.append(f"{field + ': ' if field else ''}{item['msg']}{value}")
    return "; ".join(parts)
