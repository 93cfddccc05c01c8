"""Runs a stage over a whole set of records: batch by batch, and on from where it was stopped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from reframe_vl.data.report import RecordError
from reframe_vl.data.stages.base import Outcome, Stage
from reframe_vl.data.stages.store import (
    Placed,
    StageFolder,
    file_hash,
    read_column,
    read_rows,
    write_rows,
)

logger = logging.getLogger(__name__)


class Unfinished(RecordError):
    """Records without a verdict, since a verifier gave no answer."""


def check_batch_size(batch_size: int) -> None:
    """Refuses a batch of no records, with which no stage would get anywhere.

    Raises:
        RecordError: It is below 1.
    """
    if batch_size < 1:
        raise RecordError(f"batch_size={batch_size}: give 1 or more, the records judged at once.")


def run_stage(
    stage: Stage,
    given: Path,
    folder: Path,
    batch_size: int = 64,
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Runs a stage; returns its ``records.parquet``.

    Batches that are done are kept at once. A run that was stopped, or in which a verifier failed,
    is gone on with by running again: only records without a verdict are judged. Results that were
    made of other records, settings, rules or verifiers are replaced.

    Args:
        given: The ``records.parquet`` of the stage before.
        folder: Of the stage's own files.
        progress: Is told how many more records are done.

    Raises:
        Unfinished: A verifier gave no answer for some records.
        RecordError: ``batch_size`` is below 1, or the folder lacks records or has some twice.
    """
    check_batch_size(batch_size)
    own = StageFolder(folder)
    basis = _basis(stage, given)
    before = _earlier(own, basis)
    if own.records.is_file() and before.get("complete"):
        kept = [position for (position,) in read_column(own.records, "position")]
        _check_all_once(stage, given, own, kept)
        own.remove_parts()  # Those of a run that was killed before it had removed all.
        progress(sum(before["counts"].values()))
        return own.records
    for asker in stage.askers:
        earlier = before.get("asked", {}).get(asker.name)
        if earlier is not None:
            asker.tally.resume(earlier)

    def note(**more: Any) -> None:
        asked = {asker.name: asker.tally.as_dict() for asker in stage.askers}
        own.write_manifest({**basis, "complete": False, "asked": asked, **more})

    missing = _judge(stage, given, own, batch_size, progress, note)
    if missing:
        note(without_verdict=missing)
        failed = {asker.name: dict(asker.tally.failures) for asker in stage.askers}
        raise Unfinished(
            f"{stage.name}: {missing} records or more have no verdict yet, since a verifier gave "
            f"no answer ({failed}). What was judged is kept in {folder}: run the same command "
            "again to go on."
        )
    note(complete=True, **_counts(_settle(stage, given, own)))
    own.remove_parts()
    return own.records


def _basis(stage: Stage, given: Path) -> dict[str, Any]:
    """All that a stage's results depend on; for the manifest."""
    return {
        "stage": stage.name,
        "version": stage.version,
        "input": {"file": given.parent.name, "sha256": file_hash(given)},
        "config": stage.settings,
        "verifiers": [asker.verifier.identity for asker in stage.askers],
    }


def _earlier(own: StageFolder, basis: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an earlier run that had the same basis; results of another are removed."""
    before = own.manifest()
    if {key: before.get(key) for key in basis} == basis:
        return before
    if before:
        logger.info("%s: input, settings or rules changed: it runs anew.", own.folder)
    own.clear()
    return {}


def _judge(
    stage: Stage,
    given: Path,
    own: StageFolder,
    batch_size: int,
    progress: Callable[[int], None],
    note: Callable[[], None],
) -> int:
    """Judges what was not judged before, batch by batch; returns how many stay without a verdict.

    Args:
        note: Writes the manifest.
    """
    done = {row[0] for part in own.parts() for row in read_column(part, "position")}
    progress(len(done))
    missing = 0
    waiting = _taken(stage, given, done)
    while rows := list(islice(waiting, batch_size)):
        outcomes = stage.judge([row.outcome.record for row in rows])
        found = [
            Placed(row.position, outcome)
            for row, outcome in zip(rows, outcomes, strict=True)
            if outcome.verdict is not None
        ]
        if found:
            own.add_part(found)
        note()
        progress(len(found))
        missing += len(rows) - len(found)
        if not found:
            # Whatever is wrong, asking for all the others would only take long.
            break
    return missing


def _settle(stage: Stage, given: Path, own: StageFolder) -> list[Outcome]:
    """Puts the outcomes of all batches in order, and into one file, once all are in."""
    rows = sorted(
        (row for part in own.parts() for row in read_rows(part)), key=lambda row: row.position
    )
    _check_all_once(stage, given, own, [row.position for row in rows])
    outcomes = [row.outcome for row in rows]
    settled = stage.settle(outcomes) if stage.settle is not None else {}
    outcomes = [settled.get(number, outcome) for number, outcome in enumerate(outcomes)]
    placed = (Placed(row.position, outcome) for row, outcome in zip(rows, outcomes, strict=True))
    write_rows(own.records, placed)
    return outcomes


def _check_all_once(stage: Stage, given: Path, own: StageFolder, positions: list[int]) -> None:
    """Refuses to call a stage done that lost records, or that holds some twice."""
    entered = Counter(
        position
        for position, verdict, reason in read_column(given, "position", "verdict", "reason")
        if _enters(stage, verdict, reason)
    )
    came_out = Counter(positions)
    if came_out != entered:
        lost, extra = (entered - came_out).total(), (came_out - entered).total()
        raise RecordError(
            f"{stage.name}: {lost} of {entered.total()} records are lost and {extra} are there "
            f"twice or of another run: remove the folder {own.folder} and run the same command "
            "again."
        )


def _enters(stage: Stage, verdict: str | None, reason: str) -> bool:
    """Whether a stage looks at a record that the stage before gave this verdict."""
    return verdict != "dropped" or reason in stage.rechecks


def _taken(stage: Stage, given: Path, done: set[int]) -> Iterator[Placed]:
    """The records that a stage looks at and that it has not judged yet."""
    for row in read_rows(given):
        verdict, reason = row.outcome.verdict, row.outcome.reason
        if row.position not in done and _enters(stage, verdict, reason):
            yield row


def _counts(outcomes: list[Outcome]) -> dict[str, Any]:
    verdicts = Counter(str(outcome.verdict) for outcome in outcomes)
    reasons = Counter((str(outcome.verdict), outcome.reason or "none") for outcome in outcomes)
    by_verdict: dict[str, dict[str, int]] = {}
    for (verdict, reason), number in sorted(reasons.items()):
        by_verdict.setdefault(verdict, {})[reason] = number
    return {"counts": dict(verdicts), "reasons": by_verdict}
