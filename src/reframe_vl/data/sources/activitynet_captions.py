"""ActivityNet Captions: sentences that describe windows of one video.

One object by video of ``duration``, ``timestamps`` (seconds) and ``sentences``, as many of each. A
sentence becomes the question for its window.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveFloat

from reframe_vl.data.formats.json_files import Member, members
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text, split_of
from reframe_vl.data.formats.windows import Window, moment_answer, moment_question, segments_of
from reframe_vl.data.records import MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality


class _Facts(RowFields):
    duration: PositiveFloat | None = None


class _Caption(BaseModel):
    video: str
    facts: _Facts
    timestamp: Window
    sentence: Text


class ActivityNetCaptions(Source):
    """The files of all splits."""

    licence = "Annotations: Apache-2.0 (of a copy, unverified). Videos: YouTube's terms."
    encoding = "timestamps: [start, end] in seconds, one a sentence"
    suffixes = (".json",)

    def rows(self) -> Iterator[Row | Problem]:
        """One row a sentence, with what is said of its video."""
        for path in self.files():
            for member in members(path):
                if isinstance(member, Problem):
                    yield member
                    continue
                try:
                    yield from _sentences(path, member)
                except Refused as refused:
                    yield refused.at(f"{path}, key {member.key!r}")

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """The video and the number of the sentence."""
        return (raw["video"], raw["number"])

    def record(self, row: Row) -> Record:
        """One record a sentence."""
        fields = _Caption.model_validate(row.raw)
        duration_s = fields.facts.duration
        segments, notes = segments_of([fields.timestamp], duration_s)
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=MediaInfo(path=f"{media_name(fields.video)}.mp4", duration_s=duration_s),
            split=split_of(row.path),
            question=moment_question(fields.sentence),
            answer=moment_answer(segments),
            segments=segments,
            notes=notes,
        )


def _sentences(path: Path, member: Member) -> Iterator[Row]:
    video = member.value
    if not isinstance(video, dict):
        raise Refused("bad_row", "it is no object of timestamps and sentences. Mend it.")
    windows, sentences = video.get("timestamps"), video.get("sentences")
    if not isinstance(windows, list) or not isinstance(sentences, list):
        raise Refused("bad_row", "it has no lists of timestamps and sentences. Mend it.")
    if len(windows) != len(sentences):
        raise Refused(
            "captions_disagree",
            f"it has {len(windows)} windows for {len(sentences)} sentences, so which belong "
            "together is not known. Mend or remove it.",
        )
    if not sentences:
        raise Refused("no_caption", "it has no sentence. Leave it out.")
    facts = {key: value for key, value in video.items() if key not in ("timestamps", "sentences")}
    for number, (window, sentence) in enumerate(zip(windows, sentences, strict=True)):
        raw = {
            "video": member.key,
            "number": number,
            "facts": facts,
            "timestamp": window,
            "sentence": sentence,
        }
        yield Row(path, f"key {member.key!r}, sentence {number}", raw)
