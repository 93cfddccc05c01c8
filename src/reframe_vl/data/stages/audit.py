"""Audit: strong verifiers look at everything, and at the evidence alone.

Dropped is what is too easy, and what the evidence does not tell. That a model answers without tools
is no reason: the verifiers see everything in full detail, and too easy is only what all of them see
at a glance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

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
from reframe_vl.data.stages.looks import LookSettings, evidence, full, glance
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Picture
from reframe_vl.data.verifiers.questions import Question, is_answered, is_shown
from reframe_vl.types import Media

NAME = "audit"
VERSION = "1"


@dataclass(frozen=True)
class AuditSettings:
    """How many verifiers have to agree.

    Attributes:
        min_support: The share of the verifiers that has to answer rightly from the evidence; ours.
    """

    min_support: float = 0.5


@dataclass
class _Case:
    """A record with what each verifier made of it."""

    record: Record
    media: Media
    evidence: tuple[Picture, ...]
    from_all: list[bool | None]
    from_evidence: list[bool | None]
    at_a_glance: list[bool | None]


def audit(
    records: Sequence[Record],
    askers: Sequence[Asker],
    open_media: OpenMedia,
    looks: LookSettings,
    settings: AuditSettings,
) -> list[Outcome]:
    """Asks each verifier up to three times of a record."""
    cases = []
    for record in records:
        media = open_media(record)
        cases.append(_Case(record, media, evidence(record, media, looks), [], [], []))
    for asker in askers:
        asked = [(Question.of(case.record), full(case.media, looks)) for case in cases]
        for case, right in zip(cases, is_answered(asker, asked), strict=True):
            case.from_all.append(right)
        shown = [case for case in cases if case.evidence]
        for case, right in zip(shown, supported(asker, shown), strict=True):
            case.from_evidence.append(right)
    for asker in askers:
        # Only what all of them answer in full detail can be too easy.
        easy = [case for case in cases if all(case.from_all) and all(case.at_a_glance)]
        glances = [(Question.of(case.record), glance(case.media, looks)) for case in easy]
        for case, right in zip(easy, is_answered(asker, glances), strict=True):
            case.at_a_glance.append(right)
    return [_decide(case, askers, settings) for case in cases]


def supported(asker: Asker, cases: Sequence[_Case]) -> list[bool | None]:
    """Whether a verifier finds the answer in the evidence alone.

    Where the question is for the place or time itself, whether it finds there what is looked for.
    """
    claims = [locates(case.record) for case in cases]
    shown = is_shown(
        asker,
        [(claim, case.evidence) for claim, case in zip(claims, cases, strict=True) if claim],
    )
    told = is_answered(
        asker,
        [
            (Question.of(case.record), case.evidence)
            for claim, case in zip(claims, cases, strict=True)
            if not claim
        ],
    )
    found = {True: iter(shown), False: iter(told)}
    return [next(found[bool(claim)]) for claim in claims]


def _decide(case: _Case, askers: Sequence[Asker], settings: AuditSettings) -> Outcome:
    record, names, count = case.record, names_of(askers), len(askers)
    if None in (*case.from_all, *case.from_evidence, *case.at_a_glance):
        return undecided(record)
    seen, told = case.from_all.count(True), case.from_evidence.count(True)
    note = f"right with everything: {seen} of {count}"
    if case.evidence:
        note += f", with the evidence alone: {told} of {count}"
    wanted = settings.min_support * count
    if (told if case.evidence else seen) < wanted:
        unsupported = case.evidence and seen >= wanted
        reason = "evidence_unsupported" if unsupported else "answer_unsupported"
        return decided(record, NAME, "dropped", reason, note, names)
    if case.at_a_glance and all(case.at_a_glance):
        return decided(record, NAME, "dropped", "too_easy", f"{note}, at a glance: all", names)
    split = case.evidence and told < count
    return decided(record, NAME, "kept", "verifiers_disagree" if split else "", note, names)


def audit_stage(
    askers: Sequence[Asker], open_media: OpenMedia, looks: LookSettings, settings: AuditSettings
) -> Stage:
    """The stage, ready to run."""
    judge = partial(audit, askers=askers, open_media=open_media, looks=looks, settings=settings)
    return Stage(NAME, VERSION, asdict(settings) | asdict(looks), judge, tuple(askers))
