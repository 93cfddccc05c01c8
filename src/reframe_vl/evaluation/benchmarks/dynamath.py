"""DynaMath: mathematics in images, each seed question in several variants.

Rule: average-case accuracy over all variants; worst-case accuracy, the share of seed questions that
are right in every variant. A number is right within 0.001; a choice by its letter.

Sources: github.com/open-compass/VLMEvalKit, vlmeval/dataset/dynamath.py at
e8e78f05f3080fe28154f2130321f17951c3be94 (the authors' repository, github.com/DynaMath/DynaMath at
598c3c3d732422d29580e9ecf8f2a7928a068fdd, points there). There an answer in words is right if it is
part of the reference, an empty one too; here it must be the reference, or the same to a judge. The
prompt that asks for JSON is not used.
"""

from __future__ import annotations

import math
import re
from typing import Any

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import (
    Benchmark,
    Item,
    Judge,
    Response,
    open_score,
    right_option,
)
from reframe_vl.evaluation.rules.numbers import stated_number
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.types import Answer

_TOLERANCE = 0.001
_ROUNDING = 1e-9
_TIMES_PI = re.compile(r"(-?\d+(?:\.\d+)?|-?)\s*\*?\s*(?:π|pi)\b\.?", re.IGNORECASE)


class _Row(RowFields):
    index: Text
    qid: Text
    image: Any
    question: str
    answer: Text
    answer_type: str
    subject: str
    knowledge_level: str


class DynaMath(Benchmark):
    """``DynaMath.tsv``, with images in base64."""

    primary = "worst_case"
    by = ("subject", "level")
    files = ("DynaMath.tsv",)

    def item(self, row: Row) -> Item:
        """One item a variant; variants of a seed question are drawn together."""
        fields = _Row.model_validate(row.raw)
        if fields.answer_type == "multiple choice":
            answer = right_option(fields.answer, ())
        else:
            answer = Answer("number" if fields.answer_type == "float" else "open", fields.answer)
        return self.draft(
            fields.index,
            self.media.image(fields.image),
            fields.question,
            answer,
            groups={
                "seed": fields.qid,
                "subject": fields.subject,
                "level": fields.knowledge_level,
            },
            cluster=fields.qid,
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """1 for a right answer of its type."""
        sample = item.sample
        if sample.answer.kind == "open":
            return {"score": open_score(sample, response.text, judge)}
        if sample.answer.kind == "mcq":
            return super().score(item, response, judge)
        given, truth = _number(response.text), _number(sample.answer.value)
        if given is None or truth is None:
            return {"score": 0.0}
        return {"score": float(abs(given - truth) <= _TOLERANCE + _ROUNDING)}

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Average and worst case."""
        seeds = scored.per_group("seed", min)
        return super().measures(scored) | {"worst_case": seeds.mean("score")}


def _number(text: str) -> float | None:
    times = _TIMES_PI.fullmatch(text.strip().strip("$"))
    if times:
        factor = times[1]
        return math.pi * (float(factor) if factor.lstrip("-") else float(f"{factor}1"))
    return stated_number(text)
