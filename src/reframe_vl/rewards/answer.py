"""R_ans of docs/method.md, 1.1: whether the answer is right."""

from __future__ import annotations

import logging
from functools import lru_cache

from reframe_vl.rewards.choice import read_choice
from reframe_vl.rewards.math_check import math_equal
from reframe_vl.rewards.number import numbers_agree, read_number
from reframe_vl.rewards.text import normalise, strip_lead_in, strip_markup
from reframe_vl.types import Answer, Rollout, Sample

logger = logging.getLogger(__name__)


def answer_reward(rollout: Rollout, sample: Sample) -> float | None:
    """1.0 for a right answer, 0.0 for a wrong, empty or missing one.

    The last answer block counts (several cost in ``validity``). None where the rollout failed for
    the infrastructure's sake, or where the reference itself cannot be read (logged, once).
    """
    if not rollout.played:
        return None
    text = rollout.answers[-1] if rollout.answers else ""
    right = is_right(text, sample.answer, sample.options)
    if right is None:
        _warn_once(sample.id, sample.answer)
        return None
    return float(right)


def is_right(text: str, answer: Answer, options: tuple[str, ...] = ()) -> bool | None:
    """Whether a text gives the reference answer; None where the reference cannot be read.

    >>> is_right("Answer: **D**", Answer("mcq", "D"), ("cat", "dog", "cow", "fox"))
    True
    >>> is_right("$1,204.0", Answer("number", "1200", tolerance=0.01))
    True
    >>> is_right("The Red Car.", Answer("open", "red car")), is_right("", Answer("open", "red car"))
    (True, False)
    """
    references = (answer.value, *answer.aliases)
    match answer.kind:
        case "mcq":
            return _is_option(text, references, options)
        case "number":
            return _is_number(text, references, answer.tolerance)
        case "expression":
            return any(math_equal(reference, text) for reference in references)
        case "open" | "span":
            return _is_text(text, references)


def _is_option(text: str, references: tuple[str, ...], options: tuple[str, ...]) -> bool | None:
    wanted = {read_choice(reference, options) for reference in references} - {None}
    return read_choice(text, options) in wanted if wanted else None


def _is_number(text: str, references: tuple[str, ...], tolerance: float) -> bool | None:
    wanted = [number for r in references if (number := read_number(r)) is not None]
    if not wanted:
        return None
    given = read_number(text)
    return given is not None and any(numbers_agree(given, w, tolerance) for w in wanted)


def _is_text(text: str, references: tuple[str, ...]) -> bool | None:
    wanted = {normalise(reference) for reference in references} - {""}
    if not wanted:
        return None
    return bool(wanted & {normalise(text), normalise(strip_lead_in(strip_markup(text)))})


@lru_cache(maxsize=10_000)
def _warn_once(sample_id: str, answer: Answer) -> None:
    logger.warning(
        "Sample %r: its answer %r cannot be read as kind %r, so its rollouts get no score; "
        "mend or drop the record.",
        sample_id,
        answer.value,
        answer.kind,
    )
