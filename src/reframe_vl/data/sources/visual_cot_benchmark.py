"""Visual-CoT's benchmark: conversations about an image and one box.

Two files belong together. The conversations (``benchmark/*.json``, an array) have the answer, the
box as ``###[x0, y0, x1, y1]`` behind the second image's name, and the same box in shares of the
image padded to a square, to three decimals. They do not state sizes. The questions
(``benchmark_det/*.jsonl``) have sizes and boxes in pixels, but no answers. Give both; questions
without a conversation ask for the place instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from typing import Any

from pydantic import Field

from reframe_vl.data.formats.boxes import from_padded_square, padding
from reframe_vl.data.formats.json_files import first_character, json_rows, line_rows
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.regions import where_answer, where_question
from reframe_vl.data.formats.rows import Number, Refused, Row, RowFields, Text, kept
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import AnswerInfo, AuditEntry, LabelledBox, MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Box, Modality

_REQUEST = re.compile(
    r"\s*Please provide the bounding box coordinate of the region that can help you answer the "
    r"question better\.\s*$"
)
_IMAGE = re.compile(r"^\s*<image>\s*")
_STEP = 0.001
"""Shares are rounded to three decimals, so a corner may be beside its place by so much."""

_Corners = tuple[Number, Number, Number, Number]


class _Corner(RowFields):
    box: _Corners


class _Turn(RowFields):
    speaker: str = Field(alias="from")
    value: Text


class _Conversation(RowFields):
    dataset: str
    split: str
    question_id: int | str
    image: list[str] = Field(min_length=1)
    conversations: list[_Turn] = Field(min_length=4)


class _Question(RowFields):
    img_path: str
    expression: str
    bbox: _Corners
    width: PositiveWhole
    height: PositiveWhole
    split: str


class VisualCotBenchmark(Source):
    """Conversations, with the sizes of the questions beside them."""

    licence = (
        "Annotations: Visual-CoT (its code: Apache-2.0). Images: as of the subset's own source. "
        "Unverified."
    )
    encoding = (
        "conversations: [x0, y0, x1, y1] as shares of the image padded to a square, three "
        "decimals; image: the same box in absolute pixels after ###"
    )
    place_encoding = "bbox: [x0, y0, x1, y1], absolute pixels of the stored image"

    def rows(self) -> Iterator[Row | Problem]:
        """Conversations with their questions, then the questions that have none."""
        files = list(self.files())
        conversations = [path for path in files if first_character(path) == "["]
        questions: dict[tuple[str, str], Row] = {}
        answered: set[tuple[str, str]] = set()
        for path in files:
            if path in conversations:
                continue
            for row in line_rows(path):
                if isinstance(row, Problem):
                    yield row
                    continue
                name = _name(row.raw, row.raw.get("img_path"))
                if name in questions:
                    message = "an earlier row has the id and image. Remove one."
                    yield Problem(row.where, "repeated_id", message)
                else:
                    questions[name] = row
        for path in conversations:
            for row in json_rows(path):
                if isinstance(row, Row):
                    images = row.raw.get("image")
                    name = _name(row.raw, images[0] if isinstance(images, list) and images else "")
                    answered.add(name)
                    question = questions[name].raw if name in questions else None
                    raw = {"conversation": row.raw, "question": question}
                    row = Row(row.path, row.place, raw)
                yield row
        for name, row in questions.items():
            if name not in answered:
                raw = {"conversation": None, "question": row.raw}
                yield Row(row.path, row.place, raw)

    def native(self, record: Record) -> Any:
        """The conversation's row and the question's; None where there is none."""
        return record.raw["conversation"], record.raw["question"]

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """The number of the question within its subset, of a conversation."""
        row = raw["conversation"]
        return row and tuple(str(row.get(key)) for key in ("dataset", "split", "question_id"))

    def record(self, row: Row) -> Record:
        """One record a conversation, or a question without one."""
        raw = row.raw["question"]
        question = None if raw is None else _Question.model_validate(raw)
        if row.raw["conversation"] is not None:
            return self._answered(row, question)
        assert question is not None
        size = (question.width, question.height)
        choice = where_answer(question.bbox, size)
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=MediaInfo(path=media_name(question.img_path), width=size[0], height=size[1]),
            split=question.split,
            question=where_question(question.expression),
            options=choice.options,
            answer=choice.answer,
            boxes=[LabelledBox(xyxy=question.bbox)],
            encoding=self.place_encoding,
            notes=[
                kept("no_conversation", "no conversation has its answer: it asks for the place")
            ],
        )

    def _answered(self, row: Row, question: _Question | None) -> Record:
        fields = _Conversation.model_validate(row.raw["conversation"])
        asked, boxed, *_, answered = fields.conversations
        name = media_name(fields.image[0])
        size = None if question is None else (question.width, question.height)
        if size is None and self.media is not None:
            size = self.media.image_size(name)
        media = (
            MediaInfo(path=name)
            if size is None
            else MediaInfo(path=name, width=size[0], height=size[1])
        )
        box, notes = _box(fields.image[1:], boxed.value, size)
        if question is not None and question.bbox != box:
            raise Refused(
                "boxes_disagree",
                f"the conversation's box is {list(box)}, the question's {list(question.bbox)}. "
                "Correct one, or leave the row out.",
            )
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=media,
            split=fields.split,
            question=_REQUEST.sub("", _IMAGE.sub("", asked.value)),
            answer=AnswerInfo(kind="open", value=answered.value.strip() or " "),
            boxes=[LabelledBox(xyxy=box)],
            notes=notes,
        )


def _name(raw: dict[str, Any], image: Any) -> tuple[str, str]:
    """The image and the number of the question, which is counted within a subset."""
    return (str(image), str(raw.get("question_id")))


def _box(
    regions: list[str], text: str, size: tuple[int, int] | None
) -> tuple[Box, list[AuditEntry]]:
    """The box in pixels: as it is said, or else of the shares, which are compared with it."""
    said = [region.partition("###")[2] for region in regions if "###" in region]
    shares = _corners(text)
    if not said:
        if size is None:
            raise Refused(
                "size_unknown",
                "its box is in shares of the padded image, and the image's size is not known. "
                "Give the questions' file too, or the folder of the images.",
            )
        note = kept("rounded_box", "its box is known to a thousandth of the longer side only")
        return from_padded_square(shares, size), [note]
    box = _corners(said[0])
    if size is None:
        return box, []
    left, top = padding(size)
    side = max(size)
    padded = (box[0] + left, box[1] + top, box[2] + left, box[3] + top)
    # Shares end at 1, pixels of careless boxes do not.
    expected = [min(1.0, max(0.0, number / side)) for number in padded]
    if max(abs(a - b) for a, b in zip(expected, shares, strict=True)) > _STEP:
        raise Refused(
            "boxes_disagree",
            f"its box of shares {list(shares)} is not its box of pixels {list(box)} in an image of "
            f"{size[0]}x{size[1]}. Correct one, or leave the row out.",
        )
    return box, []


def _corners(text: str) -> _Corners:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Refused("bad_row", f"{text[:80]!r} is no box [x0, y0, x1, y1].") from error
    return _Corner.model_validate({"box": value}).box
