"""The five stages in a row, from the records of the sources to those of the finished set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reframe_vl.data.media import file_version
from reframe_vl.data.records import Record
from reframe_vl.data.stages import audit, diagnose, finalise, pool, shortcut
from reframe_vl.data.stages.base import OpenMedia, Outcome, Stage
from reframe_vl.data.stages.held_out import HeldOut
from reframe_vl.data.stages.looks import LookSettings
from reframe_vl.data.stages.runner import check_batch_size, run_stage
from reframe_vl.data.stages.store import Placed, StageFolder, read_column, read_rows, write_rows
from reframe_vl.data.verifiers.asker import Asker

STAGES = (pool.NAME, shortcut.NAME, audit.NAME, diagnose.NAME, finalise.NAME)
"""In order."""

ASKING = frozenset((shortcut.NAME, audit.NAME, diagnose.NAME))
"""Those that ask verifiers."""


@dataclass(frozen=True)
class PipelineSettings:
    """What each stage goes by."""

    pool: pool.PoolSettings = field(default_factory=pool.PoolSettings)
    shortcut: shortcut.ShortcutSettings = field(default_factory=shortcut.ShortcutSettings)
    looks: LookSettings = field(default_factory=LookSettings)
    audit: audit.AuditSettings = field(default_factory=audit.AuditSettings)
    diagnose: diagnose.DiagnoseSettings = field(default_factory=diagnose.DiagnoseSettings)
    finalise: finalise.FinaliseSettings = field(default_factory=finalise.FinaliseSettings)


@dataclass(frozen=True)
class Disposition:
    """Where a record came to rest.

    Attributes:
        stage: The one that dropped it, or the last.
    """

    id: str
    source: str
    stage: str
    verdict: str
    reason: str


def make_stages(
    names: Sequence[str],
    settings: PipelineSettings,
    open_media: OpenMedia | None = None,
    askers: Sequence[Asker] = (),
    held_out: HeldOut | None = None,
    unread: frozenset[str] = frozenset(),
) -> list[Stage]:
    """The stages of these names, ready to run.

    Args:
        unread: Adapters whose media are not read although those of others are.

    Raises:
        ValueError: A name is unknown, stands out of order or twice, or a stage lacks what it needs.
    """
    if list(names) != [name for name in STAGES if name in names] or not names:
        raise ValueError(
            f"stages=[{','.join(names)}]: give some of {', '.join(STAGES)}, each once and in this "
            "order."
        )
    stages = []
    for name in names:
        if name in ASKING and (open_media is None or unread or not askers):
            of = f" of {', '.join(sorted(unread))}" if unread else ""
            raise ValueError(
                f"The stage {name} shows the media{of} to verifiers: give media= and verifiers=, "
                "or leave it out of stages=."
            )
        match name:
            case pool.NAME:
                given = held_out or HeldOut()
                stage = pool.pool_stage(open_media, given, settings.pool, unread)
            case shortcut.NAME:
                stage = shortcut.shortcut_stage(askers, settings.shortcut)
            case audit.NAME:
                assert open_media is not None
                stage = audit.audit_stage(askers, open_media, settings.looks, settings.audit)
            case diagnose.NAME:
                assert open_media is not None
                looks = settings.looks
                stage = diagnose.diagnose_stage(askers, open_media, looks, settings.diagnose)
            case _:
                stage = finalise.finalise_stage(settings.finalise)
        stages.append(stage)
    return stages


def run_pipeline(
    stages: Sequence[Stage],
    records: Iterable[Record],
    work: Path,
    batch_size: int = 64,
    progress: Callable[[str, int], None] = lambda stage, done: None,
) -> None:
    """Runs stages one after the other; each has a folder of its name in ``work``.

    Raises:
        Unfinished: A verifier gave no answer; running again goes on from there.
        RecordError: ``batch_size`` is below 1, or a stage's folder lacks records.
    """
    check_batch_size(batch_size)
    given = StageFolder(work / "sources").records
    write_rows(given, (Placed(n, _with_version(record)) for n, record in enumerate(records)))
    for stage in stages:

        def told(done: int, name: str = stage.name) -> None:
            progress(name, done)

        given = run_stage(stage, given, work / stage.name, batch_size, told)


def _with_version(record: Record) -> Outcome:
    """What the stages are given: results are void where a media file was replaced by another."""
    return Outcome(record, None, facts={"file": file_version(Path(record.media.path))})


def finished_records(work: Path, last: str) -> Iterator[Record]:
    """The records that a stage kept, in order."""
    for row in read_rows(StageFolder(work / last).records):
        if row.outcome.verdict != "dropped":
            yield row.outcome.record


def dispositions(work: Path, names: Sequence[str]) -> list[Disposition]:
    """What became of each record, in order, when the stages of these names are done."""
    found: dict[int, Disposition] = {}
    for name in names:
        path = StageFolder(work / name).records
        columns = ("position", "id", "source", "verdict", "reason")
        for position, id_, source, verdict, reason in read_column(path, *columns):
            # What was dropped before, and looked at again in vain, keeps its first reason.
            if reason != diagnose.RECHECK_FAILED:
                found[position] = Disposition(id_, source, name, verdict, reason)
    return [found[position] for position in sorted(found)]
