"""Charades-STA: a sentence and the window of a video that it describes.

Three encodings are read, told apart by the file's name: the published lines ``VIDEO START
END##SENTENCE`` (``.txt``), JSON lines with ``query``, ``duration`` and ``relevant_windows``
(``.jsonl``), and one object whose ``annotations`` have ``image_id``, ``caption`` and ``timestamp``
(``.json``). Only the second states durations.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

from reframe_vl.data.formats.json_files import EMPTY, Member, line_rows, members
from reframe_vl.data.formats.media_folder import video_name
from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text, split_of
from reframe_vl.data.formats.windows import Window, moment_answer, moment_question, segments_of
from reframe_vl.data.records import MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.data.text_files import iter_json_lines
from reframe_vl.types import Modality

_LINE = re.compile(r"(?P<vid>\S+)\s+(?P<start>\S+)\s+(?P<end>\S+?)\s*##(?P<query>.*)", re.DOTALL)


class _Query(RowFields):
    vid: Text
    query: Text
    duration: PositiveFloat | None = None
    relevant_windows: tuple[Window, ...] = ()
    split: str | None = None


class _Caption(RowFields):
    image_id: Text
    caption: Text
    timestamp: Window


class CharadesSta(Source):
    """All three encodings."""

    licence = "Charades: for non-commercial research only (unverified)."
    encoding = "relevant_windows: [start, end] in seconds"
    line_encoding = "VIDEO START END##SENTENCE, in seconds"
    caption_encoding = "timestamp: [start, end] in seconds"
    suffixes = (".txt", ".jsonl", ".json")

    def rows(self) -> Iterator[Row | Problem]:
        """One row a sentence."""
        for path in self.files():
            match path.suffix.lower():
                case ".txt":
                    yield from _lines(path)
                case ".json":
                    yield from _captions(path)
                case _:
                    yield from line_rows(path)

    def native(self, record: Record) -> Any:
        """The line, or the object."""
        return record.raw.get("line", record.raw)

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """``qid`` or ``id``, where there is one."""
        name = raw.get("qid", raw.get("id"))
        return None if name is None else str(name)

    def record(self, row: Row) -> Record:
        """One record a sentence."""
        if "line" in row.raw:
            found = _LINE.fullmatch(row.raw["line"].strip())
            if found is None:
                text = f"{row.raw['line'][:80]!r} is no line VIDEO START END##SENTENCE. Mend it."
                raise Refused("bad_row", text)
            window = [found["start"], found["end"]]
            fields = _Query.model_validate({**found.groupdict(), "relevant_windows": [window]})
            encoding = self.line_encoding
        elif "caption" in row.raw:
            caption = _Caption.model_validate(row.raw)
            fields = _Query(
                vid=caption.image_id,
                query=caption.caption,
                relevant_windows=(caption.timestamp,),
            )
            encoding = self.caption_encoding
        else:
            fields = _Query.model_validate(row.raw)
            encoding = self.encoding
        segments, notes = segments_of(fields.relevant_windows, fields.duration)
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=MediaInfo(
                path=video_name(fields.vid),
                duration_s=fields.duration,
            ),
            split=fields.split or split_of(row.path),
            question=moment_question(fields.query),
            answer=moment_answer(segments),
            segments=segments,
            notes=notes,
            encoding=encoding,
        )


def _lines(path: Path) -> Iterator[Row | Problem]:
    number = 0
    for number, line in iter_json_lines(path):
        place = f"line {number}"
        try:
            yield Row(path, place, {"line": line.decode().rstrip("\r\n")})
        except UnicodeDecodeError as error:
            yield Problem(f"{path}, {place}", "bad_text", f"{error}. Mend or remove the line.")
    if not number:
        yield Problem(str(path), "empty_file", EMPTY)


def _captions(path: Path) -> Iterator[Row | Problem]:
    found = False
    for member in members(path):
        if isinstance(member, Problem):
            found = True
            yield member
        elif member.key == "annotations" and isinstance(member.value, list):
            found = True
            yield from _caption_rows(path, member)
    if not found:
        yield Problem(str(path), "bad_row", "it has no list of annotations. Mend the file.")


def _caption_rows(path: Path, member: Member) -> Iterator[Row | Problem]:
    for number, value in enumerate(member.value, 1):
        place = f"annotation {number}"
        if isinstance(value, dict):
            yield Row(path, place, value)
        else:
            yield Problem(f"{path}, {place}", "bad_row", "it is no object. Mend or remove it.")
