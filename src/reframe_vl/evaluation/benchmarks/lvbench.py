"""LVBench: videos of an hour and more; multiple choice, one or several abilities a question.

Rule: accuracy over all questions; by ability, a question counting under each of its own.

Sources: github.com/THUDM/LVBench, lvbench/metrics/compute_accuracy.py and README.md at
f998d95541cd5f0953c52449b185c6467b9b099d. That options stand in the question's text as ``(A) …`` is
known from other readers of the file (unverified in the authors' repository).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.data.report import Problem
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.rules.letters import IN_PARENTHESES, split_options


class _Row(RowFields):
    key: str
    uid: Text
    question: str
    answer: str
    question_type: tuple[str, ...]


class LVBench(Benchmark):
    """``video_info.meta.jsonl``, and videos named by ``key``."""

    by = ("ability",)
    files = ("video_info.meta.jsonl",)

    def rows(self) -> Iterator[Row | Problem]:
        """A line holds the questions of a video."""
        for row in super().rows():
            if isinstance(row, Problem) or not isinstance(row.raw.get("qa"), list):
                yield row
                continue
            for question in row.raw["qa"]:
                named = question if isinstance(question, dict) else {}
                yield replace(row, raw={"key": row.raw.get("key"), **named})

    def item(self, row: Row) -> Item:
        """One item a question."""
        fields = _Row.model_validate(row.raw)
        question, options = split_options(fields.question, IN_PARENTHESES)
        return self.draft(
            fields.uid,
            self.media.video(fields.key),
            question,
            right_option(fields.answer, options),
            options,
            groups={"ability": fields.question_type},
        )
