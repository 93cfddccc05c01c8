"""Diagnose: finds errors that are left, and asks again.

Rules find questions that have no one right answer. What the audit's verifiers did not agree on is
asked again in other forms. And what the audit dropped since the evidence did not show the answer,
while the whole did, is looked at once more: the annotation may be right, but in another frame or
unit. Then it is converted, if that helps many records of a source: one alone may be luck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from reframe_vl.data.evidence import expand_box
from reframe_vl.data.records import Record
from reframe_vl.data.stages.base import (
    OpenMedia,
    Outcome,
    Stage,
    decided,
    locates,
    names_of,
    undecided,
)
from reframe_vl.data.stages.looks import LookSettings, evidence
from reframe_vl.data.stages.variants import box_readings, segment_readings
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Picture
from reframe_vl.data.verifiers.questions import Question, is_answered, is_shown
from reframe_vl.rewards.text import normalise
from reframe_vl.types import Media, Modality

NAME = "diagnose"
VERSION = "1"
RECHECK_FAILED = "recheck_failed"
"""What the audit dropped stays dropped."""

_Form: TypeAlias = tuple[Question, tuple[Picture, ...], str | None]
"""A question, what is shown with it, and what is claimed to be shown where it asks for a place."""


@dataclass(frozen=True)
class DiagnoseSettings:
    """What is tried; ours.

    Attributes:
        min_support: The share of right answers that keeps a record, over verifiers and forms.
        min_share: Of a source's records that are looked at once more, the share that a reading in
            another frame or unit has to help.
        min_records: The records of a source that it has to help.
        scales: By which images may have been resized before their boxes were drawn.
        sides: Pixels that the longer side, or both sides, may then have had. 1000 stands for grids
            of thousandths.
    """

    min_support: float = 0.5
    min_share: float = 0.2
    min_records: int = 3
    scales: tuple[float, ...] = (0.5, 2.0)
    sides: tuple[int, ...] = (1000, 224, 336, 448, 512, 640, 768, 1024, 1280)


def diagnose(
    records: Sequence[Record],
    askers: Sequence[Asker],
    open_media: OpenMedia,
    looks: LookSettings,
    settings: DiagnoseSettings,
) -> list[Outcome]:
    """Checks by rules, and asks again where there is doubt."""
    forms: list[dict[str, _Form]] = []
    changed: list[dict[str, Record]] = []
    for record in records:
        doubt = record.audit[-1].reason if record.audit else None
        readings: dict[str, Record] = {}
        found: dict[str, _Form] = {}
        if doubt == "evidence_unsupported":
            readings = _readings(record, settings)
            media = open_media(record)
            found = {name: _strict(other, media, looks) for name, other in readings.items()}
        elif doubt == "verifiers_disagree" and not _rule_problem(record):
            found = _other_forms(record, open_media(record), looks)
        forms.append(found)
        changed.append(readings)
    votes: list[dict[str, list[bool | None]]] = [{name: [] for name in f} for f in forms]
    for asker in askers:
        places = [(number, name) for number, found in enumerate(forms) for name in found]
        verdicts = _ask(asker, [forms[number][name] for number, name in places])
        for (number, name), verdict in zip(places, verdicts, strict=True):
            votes[number][name].append(verdict)
    return [
        _decide(record, other, vote, askers, settings)
        for record, other, vote in zip(records, changed, votes, strict=True)
    ]


def _rule_problem(record: Record) -> tuple[str, str] | None:
    """Says why a question has no one right answer: (reason, note), or None."""
    if not record.options:
        return None
    options = [normalise(option) for option in record.options]
    if record.answer.kind == "mcq":
        right = options[ord(record.answer.value) - ord("A")]
    else:
        right = normalise(record.answer.value)
        if right not in options:
            note = f"the answer {record.answer.value!r} is none of the options"
            return "answer_not_among_options", note
    if options.count(right) > 1:
        return "ambiguous_options", "several options are the right one"
    return None


def _readings(record: Record, settings: DiagnoseSettings) -> dict[str, Record]:
    """The record with its annotation read in other frames or units."""
    found = {}
    for name, boxes in box_readings(record, settings.scales, settings.sides).items():
        pairs = zip(record.boxes, boxes, strict=True)
        moved = tuple(box.model_copy(update={"xyxy": xyxy}) for box, xyxy in pairs)
        found[name] = record.model_copy(update={"boxes": moved})
    for name, segments in segment_readings(record).items():
        found[name] = record.model_copy(update={"segments": segments})
    return found


def _strict(record: Record, media: Media, looks: LookSettings) -> _Form:
    """Boxes are shown as annotated: those of a wrong scale then rarely happen to hold it all."""
    if record.modality is Modality.IMAGE:
        pictures = tuple(Picture(media, looks.image_pixels, box.xyxy) for box in record.boxes)
    else:
        pictures = evidence(record, media, looks)
    return Question.of(record), pictures, locates(record)


def _other_forms(record: Record, media: Media, looks: LookSettings) -> dict[str, _Form]:
    """The same question with other letters, and with more around the evidence."""
    question, claim = Question.of(record), locates(record)
    shown = evidence(record, media, looks)
    wider = tuple(
        Picture(media, picture.max_pixels, expand_box(picture.box, media.size))
        if picture.box is not None
        else picture
        for picture in shown
    )
    forms = {"wider": (question, wider, claim)}
    for turn in range(1, min(len(question.options), 4)):
        forms[f"options turned by {turn}"] = (question.rotated(turn), shown, claim)
    return forms


def _ask(asker: Asker, forms: Sequence[_Form]) -> list[bool | None]:
    claimed = [(claim, pictures) for _, pictures, claim in forms if claim]
    asked = [(question, pictures) for question, pictures, claim in forms if not claim]
    found = {True: iter(is_shown(asker, claimed)), False: iter(is_answered(asker, asked))}
    return [next(found[bool(claim)]) for _, _, claim in forms]


def _decide(
    record: Record,
    readings: dict[str, Record],
    votes: dict[str, list[bool | None]],
    askers: Sequence[Asker],
    settings: DiagnoseSettings,
) -> Outcome:
    dropped_before = bool(record.audit) and record.audit[-1].verdict == "dropped"
    problem = None if dropped_before else _rule_problem(record)
    if problem is not None:
        return decided(record, NAME, "dropped", *problem)
    if any(None in vote for vote in votes.values()):
        return undecided(record)
    names = names_of(askers) if votes else None
    if dropped_before:
        return _converted(record, readings, votes, names, settings.min_support * len(askers))
    if votes:
        right = sum(vote.count(True) for vote in votes.values())
        asked = sum(map(len, votes.values()))
        note = f"asked in {len(votes)} other forms: right {right} of {asked}"
        if right < settings.min_support * asked:
            return decided(record, NAME, "dropped", "evidence_doubtful", note, names)
        return decided(record, NAME, "kept", "", note, names)
    return decided(record, NAME, "kept", "", "no error was found")


def _converted(
    record: Record,
    readings: dict[str, Record],
    votes: dict[str, list[bool | None]],
    names: str | None,
    wanted: float,
) -> Outcome:
    """The record in the one reading that shows the answer; of several boxes the smallest."""
    fitting = [name for name, vote in votes.items() if vote.count(True) >= wanted]
    if not fitting or (len(fitting) > 1 and record.modality is not Modality.IMAGE):
        note = f"{len(votes)} other readings were tried, {len(fitting)} show the answer"
        return decided(record, NAME, "dropped", RECHECK_FAILED, note, names)
    best = min(fitting, key=lambda name: _area(readings[name]))
    kind = "boxes" if record.modality is Modality.IMAGE else "segments"
    before = [list(box.xyxy) for box in record.boxes] or [list(s) for s in record.segments]
    note = (
        f"the {kind} show the answer only if read as '{best}': they were converted, before they "
        f"were {before}"
    )
    facts = {"reading": best, "before": before}
    reason = f"{kind}_converted"
    return decided(readings[best], NAME, "changed", reason, note, names, facts)


def _area(record: Record) -> float:
    corners = (box.xyxy for box in record.boxes)
    return sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in corners)


def settle_readings(outcomes: Sequence[Outcome], settings: DiagnoseSettings) -> dict[int, Outcome]:
    """Takes conversions back that help too few records of their source."""
    again: Counter[str] = Counter()
    helped: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        reading = outcome.facts.get("reading")
        again[outcome.record.source] += bool(reading) or outcome.reason == RECHECK_FAILED
        if reading:
            helped[outcome.record.source, reading] += 1
    settled = {}
    for number, outcome in enumerate(outcomes):
        reading, source = outcome.facts.get("reading"), outcome.record.source
        number_helped = helped[source, reading or ""]
        enough = max(settings.min_records, settings.min_share * again[source])
        if reading and number_helped < enough:
            note = (
                f"the reading '{reading}' shows the answer of {number_helped} of "
                f"{again[source]} records of {source} that were looked at again: it may be chance"
            )
            record = _as_annotated(outcome.record, outcome.facts["before"])
            settled[number] = decided(record, NAME, "dropped", RECHECK_FAILED, note)
    return settled


def _as_annotated(record: Record, before: list[Any]) -> Record:
    """The record before its annotation was converted, without the entry that says so."""
    old: dict[str, Any] = {"segments": tuple(map(tuple, before))}
    if record.modality is Modality.IMAGE:
        pairs = zip(record.boxes, before, strict=True)
        old = {"boxes": tuple(box.model_copy(update={"xyxy": tuple(b)}) for box, b in pairs)}
    return record.model_copy(update={**old, "audit": record.audit[:-1]})


def diagnose_stage(
    askers: Sequence[Asker], open_media: OpenMedia, looks: LookSettings, settings: DiagnoseSettings
) -> Stage:
    """The stage, ready to run."""
    return Stage(
        NAME,
        VERSION,
        # As a manifest has it.
        asdict(looks)
        | asdict(settings)
        | {"scales": list(settings.scales), "sides": list(settings.sides)},
        partial(diagnose, askers=askers, open_media=open_media, looks=looks, settings=settings),
        tuple(askers),
        partial(settle_readings, settings=settings),
        frozenset({"evidence_unsupported"}),
    )
