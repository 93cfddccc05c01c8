"""Reason-RFT-CoT, spatial transformation (TRANCE): what changed between two images.

Rule: answers are sequences of ``function(object, value)``. Matched one to one, in this order: equal
calls count 1, equal function and object 0.5, equal function and value 0.5, equal function alone
0.25; the sum over the longer of the two sequences. Calls that stand there twice count once.

Sources: see ``reason_rft_counting``. Where a call could be matched with several, the earlier one is
taken; the authors' code takes them in the order of a set.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reframe_vl.evaluation.benchmarks.base import Item, Judge, Response
from reframe_vl.evaluation.benchmarks.reason_rft_counting import ReasonRFTCounting

_Call = tuple[str, str, str]
_CALL = re.compile(r"(\w+)\((\w+),\s*'?(\w+)'?\)")
_MAX_CHARS = 2_000

_ROUNDS: tuple[tuple[float, Callable[[_Call], object]], ...] = (
    (1.0, lambda call: call),
    (0.5, lambda call: call[:2]),
    (0.5, lambda call: (call[0], call[2])),
    (0.25, lambda call: call[0]),
)


class ReasonRFTSpatial(ReasonRFTCounting):
    """``test_jsons/Spatial-Transformation-*.json``, and the release's images, side by side."""

    is_binary = False
    files = ("Spatial-Transformation-*.json",)

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """The share of the sequence that is right."""
        return {"score": sequence_score(response.text, item.sample.answer.value)}


def sequence_score(given: str, truth: str) -> float:
    """How much of a sequence of transformations is right.

    >>> sequence_score("change_color(1, red)", "change_color(1, blue), change_size(2, small)")
    0.25
    """
    ours, theirs = _calls(given), _calls(truth)
    if not ours or not theirs:
        return 0.0
    longer = max(len(ours), len(theirs))
    total = 0.0
    for worth, part in _ROUNDS:
        for call in list(ours):
            match = next((other for other in theirs if part(other) == part(call)), None)
            if match is not None:
                ours.remove(call)
                theirs.remove(match)
                total += worth
    return total / longer


def _calls(text: str) -> list[_Call]:
    return list(dict.fromkeys(_CALL.findall(text[-_MAX_CHARS:])))
