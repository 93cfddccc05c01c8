"""TVQA+: multiple choice about clips of a series, with a window and boxes in some of its frames.

One array: ``q``, ``a0`` to ``a4``, ``answer_idx`` (text), ``ts`` in seconds, and ``bbox``: by
number of the frame, boxes of ``left``, ``top``, ``width``, ``height``, ``label``. Frames were taken
at 3 a second and are counted from 1. Sizes are not stated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from pydantic import Field

from reframe_vl.data.formats.boxes import from_corner_and_size
from reframe_vl.data.formats.choices import choose
from reframe_vl.data.formats.json_files import json_rows
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Number, Refused, Row, RowFields, Text, Whole, split_of
from reframe_vl.data.formats.windows import Window, segments_of
from reframe_vl.data.records import LabelledBox, MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality

_FPS = 3


class _Box(RowFields):
    left: Number
    top: Number
    width: Number
    height: Number
    label: str | None = None
    img_id: Whole | None = None


class _Fields(RowFields):
    vid_name: Text
    q: Text
    a0: Text
    a1: Text
    a2: Text
    a3: Text
    a4: Text
    answer_idx: Whole | None = None
    ts: Window | None = None
    bbox: dict[Whole, list[_Box]] = Field(default_factory=dict)


class TvqaPlus(Source):
    """The files of all splits; the test split keeps its answers back."""

    licence = "Annotations: MIT (of the repository, unverified). Videos: not licensed for sharing."
    encoding = (
        "ts: [start, end] in seconds; bbox: by frame at 3 a second, counted from 1, left, top, "
        "width, height in pixels of the frame"
    )

    def rows(self) -> Iterator[Row | Problem]:
        """One row a question."""
        for path in self.files():
            yield from json_rows(path)

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """``qid``."""
        return None if raw.get("qid") is None else str(raw["qid"])

    def record(self, row: Row) -> Record:
        """One record a question; boxes in the order of the frames."""
        fields = _Fields.model_validate(row.raw)
        if fields.answer_idx is None:
            raise Refused("no_answer", "the row has no answer_idx: its answer is kept back.")
        options = (fields.a0, fields.a1, fields.a2, fields.a3, fields.a4)
        choice = choose(options, fields.answer_idx)
        segments, notes = segments_of([] if fields.ts is None else [fields.ts], None)
        boxes = []
        for frame, found in sorted(fields.bbox.items()):
            for box in found:
                if box.img_id not in (None, frame):
                    raise Refused(
                        "frames_disagree",
                        f"a box of frame {frame} says that it is of {box.img_id}. Correct one, or "
                        "leave the row out.",
                    )
                boxes.append(
                    LabelledBox(
                        xyxy=from_corner_and_size(box.left, box.top, box.width, box.height),
                        label=box.label,
                        time_s=(frame - 1) / _FPS,
                        frame=frame,
                    )
                )
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=MediaInfo(path=f"{media_name(fields.vid_name)}.mp4"),
            split=split_of(row.path),
            question=fields.q,
            options=choice.options,
            answer=choice.answer,
            boxes=boxes,
            segments=segments,
            notes=[*choice.notes, *notes],
        )
