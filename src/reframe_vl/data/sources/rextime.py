"""ReXTime: questions across time, with the window that holds the answer.

Two forms are read: JSON lines with ``query``, ``relevant_windows`` and the right letter ``ans`` but
no options, and an array with ``question``, ``options``, ``span`` and ``ans``. Without options the
letter means nothing, so the question becomes one for the window.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from pydantic import AliasChoices, Field, PositiveFloat

from reframe_vl.data.formats.choices import choose, number_of_letter
from reframe_vl.data.formats.json_files import json_rows
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Row, RowFields, Text, kept, split_of
from reframe_vl.data.formats.windows import Window, moment_answer, moment_question, segments_of
from reframe_vl.data.records import MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality


class _Fields(RowFields):
    vid: Text
    question: Text = Field(validation_alias=AliasChoices("question", "query"))
    duration: PositiveFloat | None = None
    relevant_windows: tuple[Window, ...] | None = None
    span: Window | None = None
    options: tuple[Text, ...] = ()
    ans: str = ""


class ReXTime(Source):
    """Both forms."""

    licence = "Annotations: CC BY-NC-SA 4.0. Videos: of ActivityNet and QVHighlights (unverified)."
    encoding = "relevant_windows or span: [start, end] in seconds"

    def rows(self) -> Iterator[Row | Problem]:
        """One row a question."""
        for path in self.files():
            yield from json_rows(path)

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """``qid``."""
        return None if raw.get("qid") is None else str(raw["qid"])

    def record(self, row: Row) -> Record:
        """One record a question."""
        fields = _Fields.model_validate(row.raw)
        windows = fields.relevant_windows
        if windows is None:
            windows = () if fields.span is None else (fields.span,)
        segments, notes = segments_of(windows, fields.duration)
        if fields.options:
            choice = choose(fields.options, number_of_letter(fields.ans))
            question, answer, options = fields.question, choice.answer, choice.options
            notes += choice.notes
        else:
            question, answer, options = (
                moment_question(fields.question),
                moment_answer(segments),
                (),
            )
            notes.append(kept("no_options", "without options it asks for the window"))
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=MediaInfo(path=f"{media_name(fields.vid)}.mp4", duration_s=fields.duration),
            split=split_of(row.path),
            question=question,
            options=options,
            answer=answer,
            segments=segments,
            notes=notes,
        )
