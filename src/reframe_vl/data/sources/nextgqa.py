"""NExT-GQA: multiple choice about videos (csv), with windows that hold the answer (json).

The table has ``video_id``, ``frame_count``, ``width``, ``height``, ``question``, ``answer`` (the
option's text), ``qid``, ``type`` and ``a0`` to ``a4``. The windows (``gsub_….json``) are by video:
``duration`` in whole seconds, ``fps``, and ``location`` by ``qid``. The training split has none.
"""

from __future__ import annotations

import csv
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat

from reframe_vl.data.formats.choices import choose, number_of_text
from reframe_vl.data.formats.json_files import members
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Row, RowFields, split_of
from reframe_vl.data.formats.windows import Window, duration_notes, segments_of
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import MediaInfo, Record, Seconds
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.data.text_files import text_encoding
from reframe_vl.types import Modality


class _Question(RowFields):
    video_id: str = Field(min_length=1)
    frame_count: PositiveWhole
    width: PositiveWhole
    height: PositiveWhole
    question: str
    answer: str
    a0: str
    a1: str
    a2: str
    a3: str
    a4: str


class _Windows(RowFields):
    duration: PositiveFloat
    fps: PositiveFloat
    location: tuple[Window, ...]


class NextGqa(Source):
    """Tables and windows; give both files, or their folder."""

    licence = "Annotations: MIT (of the repository, unverified). Videos: of VidOR."
    encoding = "location: [start, end] in seconds"
    suffixes = (".csv", ".json")

    def rows(self) -> Iterator[Row | Problem]:
        """One row a question with its windows, then windows that have no question."""
        files = list(self.files())
        videos: dict[str, dict[str, Any]] = {}
        unasked: dict[tuple[str, str], str] = {}
        for path in files:
            if path.suffix.lower() != ".json":
                continue
            for member in members(path):
                if isinstance(member, Problem):
                    yield member
                    continue
                where = f"{path}, key {member.key!r}"
                location = member.value.get("location") if isinstance(member.value, dict) else None
                if member.key in videos:
                    message = "the video was named before. Remove one."
                    yield Problem(where, "repeated_id", message)
                elif not isinstance(location, dict):
                    message = "it has no location by question. Mend or remove it."
                    yield Problem(where, "bad_row", message)
                else:
                    videos[member.key] = member.value
                    unasked |= {(member.key, qid): f"{where}, qid {qid}" for qid in location}
        for path in files:
            if path.suffix.lower() == ".csv":
                for row in _table_rows(path):
                    if isinstance(row, Row):
                        name = (row.raw.get("video_id", ""), row.raw.get("qid", ""))
                        unasked.pop(name, None)
                        windows = _windows_of(videos.get(name[0]), name[1])
                        raw = {"question": row.raw, "windows": windows}
                        row = Row(row.path, row.place, raw)
                    yield row
        for where in unasked.values():
            yield Problem(where, "no_question", "no table has a question for these windows.")

    def native(self, record: Record) -> Any:
        """The row of the table, and what the other file says of the question's video."""
        return record.raw["question"], record.raw["windows"]

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """``video_id`` and ``qid``."""
        return (raw["question"].get("video_id"), raw["question"].get("qid"))

    def record(self, row: Row) -> Record:
        """One record a question."""
        fields = _Question.model_validate(row.raw["question"])
        options = (fields.a0, fields.a1, fields.a2, fields.a3, fields.a4)
        choice = choose(options, number_of_text(fields.answer, options))
        notes = list(choice.notes)
        media = MediaInfo(
            path=f"{media_name(fields.video_id)}.mp4",
            width=fields.width,
            height=fields.height,
            n_frames=fields.frame_count,
        )
        segments: tuple[Seconds, ...] = ()
        if row.raw["windows"] is not None:
            windows = _Windows.model_validate(row.raw["windows"])
            segments, odd = segments_of(windows.location, windows.duration)
            counted_s = fields.frame_count / windows.fps
            notes += [*odd, *duration_notes(windows.duration, counted_s, "listed, of the frames")]
            media = media.model_copy(update={"duration_s": windows.duration, "fps": windows.fps})
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=media,
            split=split_of(row.path),
            question=fields.question,
            options=choice.options,
            answer=choice.answer,
            segments=segments,
            notes=notes,
        )


def _table_rows(path: Path) -> Iterator[Row | Problem]:
    with path.open(encoding=text_encoding(path), newline="") as stream:
        table = csv.DictReader(stream, strict=True)
        try:
            names = list(table.fieldnames or ())
        except (csv.Error, UnicodeDecodeError) as error:
            message = f"its header cannot be read: {error}. Write it in UTF-8."
            yield Problem(str(path), "bad_csv", message)
            return
        if not names:
            yield Problem(str(path), "bad_csv", "it has no header. Fetch it again.")
            return
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            message = f"two columns are named {repeated[0]!r}. Rename or remove one."
            yield Problem(f"{path}, line 1", "repeated_key", message)
            return
        while True:
            try:
                fields = next(table, None)
            except UnicodeDecodeError as error:
                message = f"{error}. The file was read no further: write it in UTF-8."
                yield Problem(f"{path}, after line {table.line_num}", "bad_text", message)
                return
            except csv.Error as error:
                message = f"{error}. Mend or remove the line."
                yield Problem(f"{path}, line {table.line_num}", "bad_csv", message)
                continue
            if fields is None:
                return
            place = f"line {table.line_num}"
            if None in fields or None in fields.values():
                message = "it has not as many fields as the header. Mend or remove the line."
                yield Problem(f"{path}, {place}", "bad_row", message)
                continue
            yield Row(path, place, fields)


def _windows_of(video: dict[str, Any] | None, qid: str) -> dict[str, Any] | None:
    if video is None or qid not in video["location"]:
        return None
    return {**video, "location": video["location"][qid]}
