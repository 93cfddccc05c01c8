"""The files of a stage: outcomes in Parquet, and a manifest.

A stage's folder has ``records.parquet`` and ``manifest.json`` when it is done, and until then
``parts/``: one file a batch, so that a run that was stopped goes on where it was. At each moment
either all parts are there, or the manifest says that the stage is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reframe_vl.data.records import Record
from reframe_vl.data.report import RecordError
from reframe_vl.data.stages.base import Outcome

logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("modality", pa.string()),
        ("media", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("applicability", pa.string()),
        ("coverage", pa.float64()),
        ("verdict", pa.string()),
        ("reason", pa.string()),
        ("facts", pa.string()),
        ("record", pa.string()),
    ]
)
"""``record`` is the whole record, as a line of a record file; the other columns are to look at and
to filter by. ``position`` counts the records of the first stage, ``verdict`` is null only there."""

_ROWS_AT_ONCE = 1024
_DAMAGES = (pa.ArrowException, OSError, OverflowError, TypeError, ValueError)
"""What reading a damaged file may raise."""


@contextmanager
def only_run(work: Path) -> Iterator[None]:
    """Keeps other runs out of a work folder; also when this one is killed, no lock stays behind.

    Raises:
        RecordError: Another run is at work there.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                f"work={work} is in use by another run: wait until that one is done, or give this "
                "one a work folder of its own."
            ) from error
        yield


@dataclass(frozen=True)
class Placed:
    """An outcome and its place among all records."""

    position: int
    outcome: Outcome


def as_row(placed: Placed) -> dict[str, Any]:
    """A row of the Parquet file."""
    record, outcome = placed.outcome.record, placed.outcome
    return {
        "position": placed.position,
        "id": record.id,
        "source": record.source,
        "modality": record.modality.value,
        "media": record.media.path,
        "question": record.question,
        "answer": record.answer.value,
        "applicability": record.applicability,
        "coverage": record.coverage,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "facts": json.dumps(outcome.facts),
        "record": record.model_dump_json(),
    }


def write_rows(path: Path, rows: Iterable[Placed]) -> None:
    """Writes a Parquet file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with pq.ParquetWriter(part, SCHEMA, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for placed in rows:
                batch.append(as_row(placed))
                if len(batch) == _ROWS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
        _put(part, path)
    finally:
        part.unlink(missing_ok=True)


def _put(part: Path, path: Path) -> None:
    """Gives a file its name once its bytes are on the disk: a power cut leaves no torn file."""
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, path)


def read_rows(path: Path) -> Iterator[Placed]:
    """Reads a Parquet file row by row.

    Raises:
        RecordError: It is damaged.
    """
    columns = ["position", "verdict", "reason", "facts", "record"]
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    record = Record.model_validate_json(row["record"])
                    facts = json.loads(row["facts"])
                    outcome = Outcome(record, row["verdict"], row["reason"], facts)
                    yield Placed(row["position"], outcome)
    except _DAMAGES as error:
        raise _damaged(path, error) from error


def read_column(path: Path, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of a Parquet file.

    Raises:
        RecordError: It is damaged.
    """
    try:
        table = pq.read_table(path, columns=list(names))
        return list(zip(*(table[name].to_pylist() for name in names), strict=True))
    except _DAMAGES as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RecordError:
    said = " ".join(str(error).split())[:200]
    return RecordError(
        f"{path} is damaged ({said}): remove its folder and run the same command again. Answers of "
        "verifiers are kept beside it."
    )


def file_hash(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class StageFolder:
    """Where a stage keeps its files."""

    folder: Path

    @property
    def records(self) -> Path:
        """All outcomes, in order; there when the stage is done."""
        return self.folder / "records.parquet"

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def manifest(self) -> dict[str, Any]:
        """What is known of the stage; empty before it was begun, or where the file is torn."""
        if not self._manifest.is_file():
            return {}
        try:
            found = json.loads(self._manifest.read_bytes())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            logger.warning("%s cannot be read: the stage runs anew.", self._manifest)
            return {}
        return found

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Writes it whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._manifest.with_suffix(".part")
        part.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _put(part, self._manifest)

    def parts(self) -> list[Path]:
        """One file a batch that is done."""
        return sorted((self.folder / "parts").glob("[0-9]*.parquet"))

    def add_part(self, rows: Sequence[Placed]) -> None:
        """Keeps the outcomes of a batch."""
        # Not by how many there are: where one is missing, that would overwrite another.
        number = max((int(part.stem) for part in self.parts()), default=-1) + 1
        write_rows(self.folder / "parts" / f"{number:06}.parquet", rows)

    def remove_parts(self) -> None:
        """To be called when the manifest says that the stage is done, and not before."""
        folder = self.folder / "parts"
        if folder.exists():
            shutil.rmtree(folder)

    def clear(self) -> None:
        """Removes the results of other inputs or settings."""
        self.remove_parts()
        self.records.unlink(missing_ok=True)
        self._manifest.unlink(missing_ok=True)
