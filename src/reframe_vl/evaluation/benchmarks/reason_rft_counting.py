"""Reason-RFT-CoT, visual counting: sums and differences of objects (CLEVR-Math, Super-CLEVR).

Rule: an answer is right if it is the reference word for word, or equal as mathematics. Accuracy of
each test file (in and out of domain), and the mean of these (ours).

Sources: github.com/tanhuajie/Reason-RFT, eval/cal_score_benchmarks_for_open_source.py,
eval/eval_by_vllm_for_open_source.py and README.md at d0a8070ee441774b94618349018c7d8dafb007c9.
"""

from __future__ import annotations

from typing import Any, ClassVar

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, Response
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.rewards.answer import is_right
from reframe_vl.rewards.math_check import math_equal
from reframe_vl.types import Answer


class _Row(RowFields):
    image: str | tuple[str, ...]
    problem: str
    answer: Text


class ReasonRFTCounting(Benchmark):
    """``test_jsons/Visual-Counting-*.json``, and the release's images."""

    by: ClassVar[tuple[str, ...]] = ("split",)
    files: ClassVar[tuple[str, ...]] = ("Visual-Counting-*.json",)

    def item(self, row: Row) -> Item:
        """One item a row; the file says which split it is of."""
        fields = _Row.model_validate(row.raw)
        split = split_of_file(row.path.stem)
        images: Any = (fields.image,) if isinstance(fields.image, str) else fields.image
        return self.draft(
            f"{row.path.stem}/{row.place.split()[-1]}",
            self.media.side_by_side(images),
            fields.problem.replace("<image>", ""),
            Answer("open", fields.answer),
            groups={"split": split} | self.further_groups(fields.answer),
        )

    def further_groups(self, answer: str) -> dict[str, str]:
        """Labels beside the split."""
        return {}

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """1 for the same in words or as mathematics."""
        truth, text = item.sample.answer.value, response.text
        right = bool(is_right(text, item.sample.answer)) or math_equal(truth, text)
        return {"score": float(right)}

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """The mean of each file, and the mean of these."""
        return super().measures(scored) | {"accuracy": scored.macro("score", "split")}


def split_of_file(stem: str) -> str:
    """In or out of domain, by a file's name.

    >>> split_of_file("Spatial-Transformation-ood-left-test-1k")
    'ood-left'
    """
    parts = stem.lower().split("-")
    found = [part for part in parts if part in ("id", "ood", "left", "right")]
    return "-".join(found) or stem
