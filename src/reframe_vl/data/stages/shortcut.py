"""Shortcut: drops what can be answered from the text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from reframe_vl.data.records import Record
from reframe_vl.data.stages.base import Outcome, Stage, decided, undecided
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.questions import Question, is_answered

NAME = "shortcut"
VERSION = "1"


@dataclass(frozen=True)
class ShortcutSettings:
    """How sure a text-only answer has to be.

    Attributes:
        orders: Multiple choice is asked with the options in so many orders, and has to be answered
            rightly in all of them: by chance that happens once in (options ^ orders). Ours.
    """

    orders: int = 4


def shortcut(
    records: Sequence[Record], askers: Sequence[Asker], settings: ShortcutSettings
) -> list[Outcome]:
    """Asks each verifier without showing anything."""
    asked = [
        (number, Question.of(record).rotated(turn))
        for number, record in enumerate(records)
        for turn in range(min(len(record.options), settings.orders) or 1)
    ]
    told_by: list[list[str]] = [[] for _ in records]
    unanswered: set[int] = set()
    for asker in askers:
        right = is_answered(asker, [(question, ()) for _, question in asked])
        always = [True] * len(records)
        for (number, _), verdict in zip(asked, right, strict=True):
            always[number] &= verdict is True
            if verdict is None:
                unanswered.add(number)
        for number, known in enumerate(always):
            if known:
                told_by[number].append(asker.name)
    return [
        _decide(record, told, number in unanswered, askers)
        for number, (record, told) in enumerate(zip(records, told_by, strict=True))
    ]


def _decide(record: Record, told: list[str], is_open: bool, askers: Sequence[Asker]) -> Outcome:
    if told:
        note = "it is answered rightly from the text alone"
        return decided(record, NAME, "dropped", "text_answerable", note, ", ".join(told))
    if is_open:
        return undecided(record)
    note = "its answer is not known from the text alone"
    return decided(record, NAME, "kept", "", note, ", ".join(asker.name for asker in askers))


def shortcut_stage(askers: Sequence[Asker], settings: ShortcutSettings) -> Stage:
    """The stage, ready to run."""
    judge = partial(shortcut, askers=askers, settings=settings)
    return Stage(NAME, VERSION, asdict(settings), judge, tuple(askers))
