"""What a stage makes of a record, and what all stages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from reframe_vl.data.formats.regions import WHERE_QUESTION
from reframe_vl.data.formats.windows import MOMENT_QUESTION
from reframe_vl.data.media import ImageFile
from reframe_vl.data.record_parts import AuditEntry
from reframe_vl.data.records import Record
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.video import GridRule, VideoFile
from reframe_vl.types import Media, Modality

Verdict: TypeAlias = Literal["kept", "changed", "dropped"]

OpenMedia: TypeAlias = Callable[[Record], Media]
"""Opens the media of a record."""


@dataclass(frozen=True)
class Outcome:
    """What became of a record by a stage.

    Attributes:
        record: With the stage's entry in its ``audit``.
        verdict: None where a verifier gave no answer: the record waits for another run.
        reason: A short code to count by; empty where there is nothing to say.
        facts: What the stage found out and needs when all records are in.
    """

    record: Record
    verdict: Verdict | None
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A stage, ready to run.

    Attributes:
        version: Of its rules; a change makes earlier results void.
        settings: All that its results depend on beside records and verifiers; for the manifest.
        judge: From a batch of records to one outcome each.
        askers: The verifiers that it asks.
        settle: Says of records whose outcome depends on others what becomes of them: from
            (outcomes in order) to outcomes in place of some, by position.
        rechecks: Reasons for which the stage before dropped records that this one looks at again.
    """

    name: str
    version: str
    settings: dict[str, Any]
    judge: Callable[[Sequence[Record]], list[Outcome]]
    askers: tuple[Asker, ...] = ()
    settle: Callable[[Sequence[Outcome]], dict[int, Outcome]] | None = None
    rechecks: frozenset[str] = frozenset()


def decided(
    record: Record,
    stage: str,
    verdict: Verdict,
    reason: str,
    note: str,
    verifier: str | None = None,
    facts: dict[str, Any] | None = None,
) -> Outcome:
    """An outcome with its entry in the record's audit."""
    entry = AuditEntry(
        stage=stage, note=note, verdict=verdict, reason=reason or None, verifier=verifier
    )
    updated = record.model_copy(update={"audit": (*record.audit, entry)})
    return Outcome(updated, verdict, reason, facts or {})


def open_file(record: Record, root: Path = Path()) -> Media:
    """The file of a record's media; it is not read yet.

    Args:
        root: The folder of the record file.
    """
    path = root / record.media.path
    if record.modality is Modality.IMAGE:
        return ImageFile(path)
    return VideoFile(path, record.media.grid or GridRule(), record.media.facts)


def adapter_of(id_: str) -> str:
    """The adapter that made a record, by the record's id."""
    return id_.partition("/")[0]


def undecided(record: Record) -> Outcome:
    """A verifier gave no answer: that is no verdict."""
    return Outcome(record, None, "no_answer_of_verifier")


def names_of(askers: Sequence[Asker]) -> str:
    """Who judged."""
    return ", ".join(asker.name for asker in askers)


def locates(record: Record) -> str | None:
    """What the question asks the place or the time of, None where it asks something else.

    The evidence alone cannot tell where it lies; it can show that what is looked for is in it.
    """
    for template in (MOMENT_QUESTION, WHERE_QUESTION):
        if record.question.startswith(template.format("")):
            return record.question.removeprefix(template.format(""))
    return None
