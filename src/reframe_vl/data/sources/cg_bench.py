"""CG-Bench: multiple choice about long videos, with the windows that hold the clue.

One array has ``question``, ``choices``, ``answer`` and ``right_answer`` (its letter),
``clue_intervals`` in whole seconds and a rounded ``duration``. A second file (``video_meta``, one
object by video) has exact durations, frame rates and the number of the last frame.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from pydantic import PositiveFloat

from reframe_vl.data.formats.choices import choose, number_of_letter, number_of_text
from reframe_vl.data.formats.json_files import first_character, json_rows, members
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text
from reframe_vl.data.formats.windows import Window, duration_notes, segments_of
from reframe_vl.data.record_parts import NonNegativeWhole
from reframe_vl.data.records import MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality


class _Question(RowFields):
    video_uid: Text
    question: Text
    choices: tuple[Text, ...]
    answer: Text
    right_answer: str
    clue_intervals: tuple[Window, ...] = ()
    duration: PositiveFloat | None = None


class _Video(RowFields):
    duration: PositiveFloat
    max_frame: NonNegativeWhole
    fps: PositiveFloat


class CgBench(Source):
    """Questions, and the facts of videos beside them."""

    licence = "CG-Bench: no licence file is published with it (unverified)."
    encoding = "clue_intervals: [start, end] in whole seconds"

    def rows(self) -> Iterator[Row | Problem]:
        """One row a question, with what is said of its video."""
        videos: dict[str, Any] = {}
        questions = []
        for path in self.files():
            if first_character(path) != "{":
                questions.append(path)
                continue
            for member in members(path):
                if isinstance(member, Problem):
                    yield member
                elif member.key in videos:
                    message = "the video was named before. Remove one."
                    yield Problem(f"{path}, key {member.key!r}", "repeated_id", message)
                elif not isinstance(member.value, dict):
                    message = "it is no object of a video's facts. Give the array of questions."
                    yield Problem(f"{path}, key {member.key!r}", "bad_row", message)
                else:
                    videos[member.key] = member.value
        for path in questions:
            for row in json_rows(path):
                if isinstance(row, Row):
                    video = videos.get(str(row.raw.get("video_uid")))
                    row = Row(row.path, row.place, {"question": row.raw, "video": video})
                yield row

    def native(self, record: Record) -> Any:
        """The question's object; what is said of the video is not part of it."""
        return record.raw["question"]

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """``qid``."""
        name = raw["question"].get("qid")
        return None if name is None else str(name)

    def record(self, row: Row) -> Record:
        """One record a question."""
        fields = _Question.model_validate(row.raw["question"])
        right = number_of_letter(fields.right_answer)
        choice = choose(fields.choices, right)
        if number_of_text(fields.answer, fields.choices) != right:
            raise Refused(
                "answers_disagree",
                f"the answer {fields.answer!r} is not option {fields.right_answer}. Correct one, "
                "or leave the row out.",
            )
        notes = list(choice.notes)
        duration_s, path = fields.duration, f"{media_name(fields.video_uid)}.mp4"
        if row.raw["video"] is None:
            media = MediaInfo(path=path, duration_s=duration_s)
        else:
            video = _Video.model_validate(row.raw["video"])
            notes += duration_notes(duration_s, video.duration, "of the question, of the video")
            duration_s = video.duration
            media = MediaInfo(
                path=path, duration_s=duration_s, fps=video.fps, n_frames=video.max_frame + 1
            )
        segments, odd = segments_of(fields.clue_intervals, duration_s)
        return self.draft(
            row,
            modality=Modality.VIDEO,
            media=media,
            split="test",
            question=fields.question,
            options=choice.options,
            answer=choice.answer,
            segments=segments,
            notes=[*notes, *odd],
        )
