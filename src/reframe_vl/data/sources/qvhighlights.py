"""QVHighlights: a sentence and the windows of a clip of 150 s that it describes.

One JSON object a line: ``qid``, ``query``, ``vid``, ``duration``, ``relevant_windows`` in seconds
of the clip. ``relevant_clip_ids`` says the same in pieces of 2 s. The test split keeps its windows
back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from itertools import chain, islice
from typing import Any

from pydantic import PositiveFloat

from reframe_vl.data.formats.json_files import json_rows
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Row, RowFields, Text, Whole, kept, split_of
from reframe_vl.data.formats.windows import Window, moment_answer, moment_question, segments_of
from reframe_vl.data.records import MediaInfo, Record, Seconds
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality

_PIECE_S = 2


class _Fields(RowFields):
    vid: Text
    query: Text
    duration: PositiveFloat
    relevant_windows: tuple[Window, ...] = ()
    relevant_clip_ids: tuple[Whole, ...] | None = None


class QvHighlights(Source):
    """The release files of all splits."""

    licence = "Annotations: CC BY-NC-SA 4.0. Videos: YouTube's terms (unverified)."
    encoding = "relevant_windows: [start, end] in seconds of the clip, in steps of 2"

    def rows(self) -> Iterator[Row | Problem]:
        """One row a line."""
        for path in self.files():
            yield from json_rows(path)

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """``qid``."""
        return None if raw.get("qid") is None else str(raw["qid"])

    def record(self, row: Row) -> Record:
        """One record a row."""
        fields = _Fields.model_validate(row.raw)
        segments, notes = segments_of(fields.relevant_windows, fields.duration)
        pieces = fields.relevant_clip_ids
        if pieces is not None and sorted(pieces) != _pieces(segments, len(pieces)):
            notes.append(kept("pieces_differ", "relevant_clip_ids are not those of the windows"))
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=MediaInfo(path=f"{media_name(fields.vid)}.mp4", duration_s=fields.duration),
            split=split_of(row.path),
            question=moment_question(fields.query),
            answer=moment_answer(segments),
            segments=segments,
            notes=notes,
        )


def _pieces(segments: tuple[Seconds, ...], at_most: int) -> list[int]:
    """The numbers of the pieces in which the windows lie; one more than so many are not counted."""
    numbers = (range(int(start // _PIECE_S), math.ceil(end / _PIECE_S)) for start, end in segments)
    return sorted(set(islice(chain.from_iterable(numbers), at_most + 1)))
