"""Visual-CoT's questions about the receipts of ICDAR 2019 SROIE.

One JSON object a line: ``question``, ``answer``, ``image`` (a file name), ``width``, ``height``,
``bboxs`` (absolute pixels of the stored image, x first), ``dataset``, ``split``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.records import (
    AnswerInfo,
    AuditEntry,
    LabelledBox,
    MediaInfo,
    Record,
    describe,
    iter_json_lines,
)
from reframe_vl.data.report import Problem, Report
from reframe_vl.data.sources.base import expand_evidence, report_small_evidence
from reframe_vl.data.validation import box_problem, size_problem
from reframe_vl.types import Box, Modality

NAME = "visual_cot_sroie"
LICENCE = "Images: ICDAR 2019 SROIE challenge data, for research; annotations: Visual-CoT."
ENCODING = "bboxs: [x0, y0, x1, y1], absolute pixels of the stored image, any number of boxes"

_CARELESS_PIXELS = 1
"""Rounding and inclusive edges explain one pixel outside the image; more is another frame."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    question: str
    answer: str
    image: str
    width: PositiveInt
    height: PositiveInt
    bboxs: list[Box]
    split: str


class _Refused(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class VisualCotSroie:
    """Reads the annotation file beside a folder of images.

    Attributes:
        annotations: The JSON-lines file.
        images: The folder of the files that ``image`` names.
    """

    annotations: Path
    images: Path

    def records(self, report: Report) -> Iterator[Record]:
        """Yields one record a row, its evidence expanded; odd rows go to the report."""
        seen: set[str] = set()
        sizes: dict[str, tuple[int, int]] = {}
        for number, line in iter_json_lines(self.annotations):
            where = f"{self.annotations}, line {number}"
            try:
                record, clipped = self._record(line, number, sizes)
                if record.id in seen:
                    raise _Refused("duplicate_row", "an earlier line says the same. Remove one.")
            except _Refused as refused:
                report.add(Problem(where, refused.reason, refused.message))
                continue
            seen.add(record.id)
            for note in clipped:
                report.add(Problem(where, "box_clipped", note, kept=True))
            if not record.boxes:
                report.add(Problem(where, "no_box", "the row has no box: no evidence.", kept=True))
            report_small_evidence(record, where, report)
            report.num_kept += 1
            yield record

    def _record(
        self, line: bytes, number: int, sizes: dict[str, tuple[int, int]]
    ) -> tuple[Record, list[str]]:
        try:
            raw = json.loads(line)
        except ValueError as error:
            raise _Refused("bad_json", f"{error}. Mend or remove the line.") from error
        try:
            row = _Row.model_validate(raw)
            if row.image not in sizes:
                sizes[row.image] = self._checked_size(row.image)
            size = sizes[row.image]
            if size != (row.width, row.height):
                raise _Refused(*size_problem((row.width, row.height), size))
            origin = f"read from {self.annotations.name}, line {number}"
            boxes, clipped = _fitted(row.bboxs, size)
            record = Record(
                id=_row_id(raw, row.image),
                source=NAME,
                split=row.split,
                licence=LICENCE,
                raw=raw,
                modality=Modality.IMAGE,
                media=MediaInfo(
                    path=str((self.images / row.image).absolute()), width=size[0], height=size[1]
                ),
                question=row.question,
                answer=AnswerInfo(kind="span", value=row.answer),
                boxes=tuple(LabelledBox(xyxy=box) for box in boxes),
                native_encoding=ENCODING,
                audit=tuple(AuditEntry(stage="pool", note=note) for note in (origin, *clipped)),
            )
        except ValidationError as error:
            raise _Refused("bad_row", f"{describe(error)}. Mend or remove the line.") from error
        return expand_evidence(record), clipped

    def _checked_size(self, name: str) -> tuple[int, int]:
        path = self.images / name
        # Unlike Path.is_file, this is no error for a name that no file can have.
        if not os.path.isfile(path):
            raise _Refused(
                "media_missing",
                f"the image {path} is not there. Fetch it, or check the folder given as images=.",
            )
        image = ImageFile(path)
        try:
            image.look(None, 1)  # Truncated files have a good header.
        except MediaError as error:
            raise _Refused("media_unreadable", str(error)) from error
        return image.size


def _fitted(boxes: list[Box], size: tuple[int, int]) -> tuple[list[Box], list[str]]:
    width, height = size
    fitted, notes = [], []
    for box in boxes:
        x0, y0, x1, y1 = box
        clipped = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
        careless = max(abs(a - b) for a, b in zip(box, clipped, strict=True)) <= _CARELESS_PIXELS
        odd = box_problem(clipped if careless else box, size)
        if odd is not None:
            raise _Refused(*odd)
        if clipped != box:
            notes.append(f"the box {list(box)} was clipped to the image")
        fitted.append(clipped)
    return fitted, notes


def _row_id(raw: dict[str, Any], image: str) -> str:
    text = json.dumps(raw, sort_keys=True)
    return f"{NAME}/{Path(image).stem}/{hashlib.sha256(text.encode()).hexdigest()[:8]}"
