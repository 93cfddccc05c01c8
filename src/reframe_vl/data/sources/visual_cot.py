"""Visual-CoT's training questions: one answer and the boxes that hold it.

One JSON object a line: ``question``, ``answer``, ``image`` (a file name), ``width``, ``height``,
``bboxs`` (absolute pixels of the stored image, x first), ``dataset``, ``split``.
"""

from __future__ import annotations

from collections.abc import Iterator

from reframe_vl.data.formats.json_files import json_rows
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Number, Row, RowFields, Text
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import AnswerInfo, LabelledBox, MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality

_OF_TEXT = frozenset(("docvqa", "dude", "infographicsvqa", "sroie", "textcap", "textvqa"))
"""Subsets whose answers are strings in the image."""


class _Fields(RowFields):
    question: str
    answer: Text
    image: str
    width: PositiveWhole
    height: PositiveWhole
    bboxs: list[tuple[Number, Number, Number, Number]]
    split: str
    dataset: str = ""


class VisualCot(Source):
    """All subsets of the training data."""

    licence = (
        "Annotations: Visual-CoT (its code: Apache-2.0). Images: as of the subset's own source. "
        "Unverified."
    )
    encoding = "bboxs: [x0, y0, x1, y1], absolute pixels of the stored image, any number of boxes"

    def rows(self) -> Iterator[Row | Problem]:
        """One row a line."""
        for path in self.files():
            yield from json_rows(path)

    def record(self, row: Row) -> Record:
        """One record a row."""
        fields = _Fields.model_validate(row.raw)
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=MediaInfo(
                path=media_name(fields.image), width=fields.width, height=fields.height
            ),
            split=fields.split,
            question=fields.question,
            answer=AnswerInfo(
                kind="span" if self.is_of_text(fields.dataset) else "open",
                value=fields.answer.strip() or " ",
            ),
            boxes=[LabelledBox(xyxy=box) for box in fields.bboxs],
        )

    def is_of_text(self, dataset: str) -> bool:
        """Whether a subset's answers are strings in the image."""
        return dataset.lower() in _OF_TEXT
