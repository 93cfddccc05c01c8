"""Reason-RFT-CoT, structure perception: geometry (GeoMath, Geometry3K), choices and numbers.

Rule: as visual counting, with a choice by its letter; accuracy also of choices and of the others.
Sources: see ``reason_rft_counting``.
"""

from __future__ import annotations

from reframe_vl.evaluation.benchmarks.base import Item, Judge, Response
from reframe_vl.evaluation.benchmarks.reason_rft_counting import ReasonRFTCounting
from reframe_vl.evaluation.rules.letters import read_letter

_LETTERS = frozenset("ABCD")


class ReasonRFTStructure(ReasonRFTCounting):
    """``test_jsons/Structure-Perception-*.json``, and the release's images."""

    by = ("split", "type")
    files = ("Structure-Perception-*.json",)

    def further_groups(self, answer: str) -> dict[str, str]:
        """Whether the answer is a choice."""
        return {"type": "choice" if answer in _LETTERS else "non_choice"}

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """1 for the right letter, or as in counting."""
        truth = item.sample.answer.value
        if truth in _LETTERS:
            return {"score": float(read_letter(response.text) == truth)}
        return super().score(item, response, judge)
