"""The files of a stage: outcomes in Parquet, and a manifest.

A stage's folder has ``records.parquet`` and ``manifest.json`` when it is done, and until then
``parts/``: one file a batch, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reframe_vl.data.records import Record
from reframe_vl.data.stages.base import Outcome

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
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterator[Placed]:
    """Reads a Parquet file row by row."""
    with pq.ParquetFile(path) as file:
        columns = ["position", "verdict", "reason", "facts", "record"]
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
            for row in batch.to_pylist():
                record = Record.model_validate_json(row["record"])
                facts = json.loads(row["facts"])
                outcome = Outcome(record, row["verdict"], row["reason"], facts)
                yield Placed(row["position"], outcome)


def read_column(path: Path, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of a Parquet file."""
    table = pq.read_table(path, columns=list(names))
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


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
        """What is known of the stage; empty before it was begun."""
        if not self._manifest.is_file():
            return {}
        found: dict[str, Any] = json.loads(self._manifest.read_text(encoding="utf-8"))
        return found

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Writes it whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._manifest.with_suffix(".part")
        part.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        part.replace(self._manifest)

    def parts(self) -> list[Path]:
        """One file a batch that is done."""
        return sorted((self.folder / "parts").glob("[0-9]*.parquet"))

    def add_part(self, rows: Sequence[Placed]) -> None:
        """Keeps the outcomes of a batch."""
        write_rows(self.folder / "parts" / f"{len(self.parts()):06}.parquet", rows)

    def finish(self, rows: Iterable[Placed]) -> None:
        """Puts all outcomes into one file in place of the parts."""
        write_rows(self.records, rows)
        shutil.rmtree(self.folder / "parts", ignore_errors=True)

    def clear(self) -> None:
        """Removes the results of other inputs or settings."""
        shutil.rmtree(self.folder / "parts", ignore_errors=True)
        self.records.unlink(missing_ok=True)
        self._manifest.unlink(missing_ok=True)
