"""TIR-Bench: thirteen tasks that need images to be worked on; letters, numbers, lists and text.

Rule by task: ``ocr``: the reference is part of the answer. ``jigsaw``: the share of pieces that are
in their place. ``spot_difference``: the IoU of two sets of numbers, or an equal whole number.
``word_search``: both numbers of a place, or an equal whole number. All others by the reference:
letters (several in any order), whole numbers, or decimal ones, equal as they stand or as
mathematics. The mean over all items, and of each task.

Sources: github.com/agents-x-project/TIR-Bench, calculate_score.py and tools.py at
f79c7562b59e4f8142b0437fc725eb3ee1aec76c. There a language model reads the answer off the response,
and an unknown letter is taken for the nearest in edit distance; here the answer block is the
answer, and no letter is no choice. Two reference texts of ``ocr`` are corrected as there. Two
images are shown side by side (ours). The fields of the published file are those that this code
reads; the file itself was not seen (unverified).
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import AliasChoices, Field

from reframe_vl.data.formats.rows import Refused, Row, RowFields
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, Response
from reframe_vl.evaluation.releases.files import KEY
from reframe_vl.evaluation.rules.letters import read_letter
from reframe_vl.evaluation.rules.numbers import stated_number
from reframe_vl.rewards.math_check import math_equal
from reframe_vl.rewards.text import plain
from reframe_vl.types import Answer

_CORRECTED = {"60.jpg": "mobi", "62.jpg": "aires"}
_WHOLE = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
"""What Python reads as a number in no time: an answer may be fifty thousand digits."""
_PLACE = re.compile(r"\b(\d{1,18})\s*,\s*(\d{1,18})\b")


class _MetaData(RowFields):
    difficulty: int | None = None


class _Row(RowFields):
    prompt: str
    answer: Any
    task: str = Field(validation_alias=AliasChoices("task", "category"))
    image_1: str
    image_2: str | None = None
    meta_data: _MetaData = Field(
        default_factory=_MetaData, validation_alias=AliasChoices("meta_data", "metadata")
    )


class TIRBench(Benchmark):
    """The release's JSON, and its images."""

    is_binary = False
    by = ("task",)
    files = ("TIR-Bench*.json", "*.json", "*.jsonl")

    def item(self, row: Row) -> Item:
        """One item a row."""
        fields = _Row.model_validate(row.raw)
        answer = str(fields.answer)
        if fields.task == "ocr":
            corrections = [text for name, text in _CORRECTED.items() if name in fields.image_1]
            answer = corrections[-1] if corrections else answer
        if fields.task == "jigsaw" and _pieces(answer, fields.meta_data.difficulty) is None:
            raise Refused("bad_answer", "the answer is no order of all pieces. Leave the row out.")
        names = [name for name in (fields.image_1, fields.image_2) if name]
        number = row.raw.get("question_id", row.raw.get(KEY, row.place.split()[-1]))
        return self.draft(
            f"{fields.task}/{number}",
            self.media.side_by_side(names),
            fields.prompt,
            Answer("open", answer),
            groups={"task": fields.task},
            facts={"side": fields.meta_data.difficulty},
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """A share between 0 and 1 by the task's own rule."""
        (task,), truth = item.groups["task"], item.sample.answer.value
        text = response.text.replace("*", "").strip()
        return {"score": _score(task, text, truth, item.facts["side"]) if text else 0.0}


def _score(task: str, text: str, truth: str, side: int | None) -> float:
    whole = re.fullmatch(r"\s*[+-]?\d+\s*", truth) is not None
    match task:
        case "ocr":
            return float(truth in text)
        case "jigsaw":
            given, wanted = _pieces(text, side), _pieces(truth, side)
            if given is None or wanted is None:
                return 0.0
            return sum(g == w for g, w in zip(given, wanted, strict=True)) / len(wanted)
        case "spot_difference" if not whole:
            ours, theirs = (set(map(int, _WHOLE.findall(t))) for t in (text, truth))
            return len(ours & theirs) / len(ours | theirs) if ours | theirs else 1.0
        case "word_search" if not whole:
            places = [
                found.groups() if (found := _PLACE.search(t)) else None for t in (text, truth)
            ]
            given_place, wanted_place = places
            return float(given_place is not None and _same(given_place, wanted_place))
    if truth.isalpha():
        return _letters(text, truth)
    number, wanted_number = stated_number(text), stated_number(truth)
    if number is not None and number == wanted_number:
        return 1.0
    return float(math_equal(truth, text))


def _letters(text: str, truth: str) -> float:
    if len(truth) == 1:
        return float(read_letter(text) == truth)
    given = re.sub(r"[\s,;.()\[\]]|\band\b", "", text)
    return float(sorted(given) == sorted(truth))


def _same(given: tuple[Any, ...], wanted: tuple[Any, ...] | None) -> bool:
    return wanted is not None and [int(g) for g in given] == [int(w) for w in wanted]


def _pieces(text: str, side: int | None) -> list[int] | None:
    """The first run of numbers that is as long as there are pieces."""
    for run in re.findall(r"[\d\s,]+", plain(text)):
        numbers = [int(number) for number in _WHOLE.findall(run)]
        if side and len(numbers) == side**2:
            return numbers
    return None
