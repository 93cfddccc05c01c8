"""Outcomes as compact JSON: in a few kilobytes all that statistics need of an evaluation."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reframe_vl.evaluation.outcomes import Arm, EvaluationResult, Outcome
from reframe_vl.types import Sample

_ABSENT = "-"
_IOU_DECIMALS = 4
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Items:
    """What was to be evaluated: the media's keys by sample id, in the order that packing uses.

    Attributes:
        main: Of the plain items.
        conflict: Of the conflict set.
    """

    main: Mapping[str, str]
    conflict: Mapping[str, str]

    def of(self, arm: Arm) -> Mapping[str, str]:
        """The items that an arm is played on."""
        return self.conflict if arm is Arm.CONFLICT else self.main


def items_of(samples: Sequence[Sample], conflict_samples: Sequence[Sample] | None = None) -> Items:
    """The items of an evaluation."""
    main, conflict = (
        {sample.id: sample.media.key for sample in group}
        for group in (samples, conflict_samples or [])
    )
    return Items(main, conflict)


def pack(result: EvaluationResult, items: Items) -> dict[str, Any]:
    """An evaluation as JSON holds it; IoUs are rounded to four decimals.

    Args:
        result: On all of the items, or on some.
        items: Kept beside it, once for all evaluations on the same items.

    Raises:
        ValueError: The result has an item that is not among ``items``.
    """
    arms = {}
    for arm, outcomes in result.outcomes.items():
        known = items.of(arm)
        for name in outcomes:
            if name not in known:
                raise ValueError(
                    f"The arm {arm} has the item {name}, which is not in the list of items: pack "
                    "a result with the items it was evaluated on."
                )
        kept = [outcomes[name] for name in known if name in outcomes]
        marks = [str(int(outcomes[n].correct)) if n in outcomes else _ABSENT for n in known]
        arms[arm.value] = {
            "correct": "".join(marks).rstrip(_ABSENT),
            "calls": _column([o.calls for o in kept]),
            "visual_tokens": _column([o.visual_tokens for o in kept]),
            "iou": _column([o.iou if o.iou is None else round(o.iou, _IOU_DECIMALS) for o in kept]),
        }
    left_out = {scope: dict(reasons) for scope, reasons in result.left_out.items()}
    return {"items": result.num_items, "left_out": left_out, "arms": arms}


def unpack(packed: Mapping[str, Any], items: Items) -> EvaluationResult:
    """The evaluation that :func:`pack` made ``packed`` of.

    Raises:
        ValueError: A packed arm has more items than there are.
    """
    outcomes: dict[Arm, dict[str, Outcome]] = {}
    media: dict[str, str] = {}
    for name, columns in packed["arms"].items():
        arm = Arm(name)
        known, marks = items.of(arm), columns["correct"]
        if len(marks) > len(known):
            raise ValueError(
                f"The arm {arm} has {len(marks)} packed items, but the list of items {len(known)}: "
                "unpack a result with the items it was packed with."
            )
        # A result on the first items only has no marks for the others.
        present = [(i, m) for i, m in zip(known, marks, strict=False) if m != _ABSENT]
        values = (
            _values(columns[field], len(present)) for field in ("calls", "visual_tokens", "iou")
        )
        outcomes[arm] = {
            item: Outcome(mark == "1", calls, visual_tokens, iou)
            for (item, mark), calls, visual_tokens, iou in zip(present, *values, strict=True)
        }
        media |= {item: known[item] for item, _ in present}
    return EvaluationResult(
        outcomes, dict(sorted(media.items())), packed["items"], packed["left_out"]
    )


def _column(values: Sequence[float | None]) -> Any:
    """One value where all are equal; a letter for each where they are few; else a list.

    Most arms make no calls and look at the same number of views, and a coarse grid of coordinates
    has few IoUs.
    """
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    if len(distinct) > len(_LETTERS):
        return list(values)
    letter = dict(zip(distinct, _LETTERS, strict=False))
    return {"values": distinct, "letters": "".join(letter[value] for value in values)}


def _values(column: Any, count: int) -> list[Any]:
    if isinstance(column, dict):
        return [column["values"][_LETTERS.index(letter)] for letter in column["letters"]]
    return column if isinstance(column, list) else [column] * count
