"""MathVerse: mathematics in diagrams, each problem in five versions with an image.

Rule: a judge compares the answer with the reference; accuracy over the five versions, by version,
by subject and by its field. The text-only version, which the authors keep out of the overall score
too, has no image and is left out.

Sources: github.com/ZrrSkywalker/MathVerse, evaluation/score_answer_s2.py, README.md and
output_templates/output_testmini.json at 937b090597aeafb8e82b35d310a4bc5b9e2ea29d. Here choices are
compared by letter, and other answers first word for word and as mathematics; only what is left goes
to the judge, whose words are ours.
"""

from __future__ import annotations

from typing import Any

from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import (
    Benchmark,
    Item,
    Judge,
    Response,
    open_score,
    right_option,
)
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.letters import ON_LINES, split_options
from reframe_vl.rewards.math_check import math_equal
from reframe_vl.types import Answer


class _Metadata(RowFields):
    subject: str
    subfield: str


class _Row(RowFields):
    sample_index: Text
    problem_index: Text
    problem_version: str
    question: str = ""
    query_wo: str = ""
    image: Any = None
    answer: Text
    question_type: str
    metadata: _Metadata


class MathVerse(Benchmark):
    """``testmini.json`` with ``images/``, or Parquet with images inside."""

    by = ("version", "subject", "subfield")
    hub = Hub("AI4Math/MathVerse", "testmini", ("testmini",))
    files = ("testmini.json", "testmini.parquet", "testmini-*.parquet")

    def item(self, row: Row) -> Item:
        """One item a version; versions of a problem are drawn together.

        Of the version Vision Only the question stands in the image, and only the query asks.
        """
        fields = _Row.model_validate(row.raw)
        if fields.problem_version.replace("_", " ") == "Text Only" or not fields.image:
            raise Refused("no_image", "the text-only version is not evaluated.")
        asked = fields.question or fields.query_wo
        options: tuple[str, ...] = ()
        if fields.question_type == "multi-choice":
            asked, options = split_options(asked, ON_LINES)
            answer = right_option(fields.answer, options)
        else:
            answer = Answer("open", fields.answer)
        return self.draft(
            fields.sample_index,
            self.media.image(fields.image),
            asked.strip().removesuffix("Choices:"),
            answer,
            options,
            groups={
                "version": fields.problem_version,
                "subject": fields.metadata.subject,
                "subfield": fields.metadata.subfield,
            },
            cluster=fields.problem_index,
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """1 for the right choice, or for an answer that is the same in words or as mathematics."""
        sample = item.sample
        if sample.answer.kind == "open" and math_equal(sample.answer.value, response.text):
            return {"score": 1.0}
        if sample.answer.kind == "open":
            return {"score": open_score(sample, response.text, judge)}
        return super().score(item, response, judge)
