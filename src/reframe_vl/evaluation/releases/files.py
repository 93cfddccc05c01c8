"""Rows of published files: Parquet, TSV, CSV, JSON and JSON lines, media held in them included."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from reframe_vl.data.formats.json_files import (
    array_rows,
    first_character,
    line_rows,
    members,
)
from reframe_vl.data.formats.rows import Row
from reframe_vl.data.report import Problem

KEY = "_key"
"""Where a row keeps its key, of a file that is one object of rows."""

_ROWS_AT_ONCE = 8
"""Of a table with images of some megabytes each."""

_LONGEST_FIELD = 2**31 - 1

_PACKED = frozenset((".gz", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z"))


@dataclass(frozen=True)
class Hub:
    """Where a release lies on the Hugging Face hub.

    Attributes:
        configs: Of the data set; None is its only one.
        file: In place of a config: the one file to read.
    """

    repository: str
    split: str
    configs: tuple[str | None, ...] = (None,)
    file: str | None = None


def files_of(path: Path, patterns: Iterable[str]) -> list[Path]:
    """A file itself, or those in a folder and below that match the first pattern that any matches.

    Raises:
        FileNotFoundError: There are none.
    """
    if path.is_file():
        return [path]
    for pattern in patterns:
        if found := sorted(path.rglob(pattern)):
            return found
    raise FileNotFoundError(
        f"{path} is no file, nor a folder that holds {' or '.join(patterns)}: set benchmark_path "
        "to the release's files (docs/evaluation.md says which)."
    )


def rows_of(path: Path) -> Iterator[Row | Problem]:
    """The rows of a file, by its suffix; empty fields of a table are no fields."""
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        yield Problem(str(path), "packed_file", "it is packed. Unpack it, and name what is in it.")
    elif suffix == ".parquet":
        yield from _parquet_rows(path)
    elif suffix in (".tsv", ".csv"):
        yield from _table_rows(path, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".jsonl":
        yield from line_rows(path)
    elif first_character(path) == "[":
        yield from array_rows(path)
    else:
        for member in members(path):
            if isinstance(member, Problem):
                yield member
            elif isinstance(member.value, dict):
                yield Row(path, f"key {member.key!r}", {KEY: member.key, **member.value})


def hub_rows(hub: Hub) -> Iterator[Row]:
    """The rows of a data set of the hub, images undecoded."""
    for config in hub.configs:
        files = {hub.split: hub.file} if hub.file else None
        table = datasets.load_dataset(
            "csv" if hub.file else hub.repository,
            config,
            data_files={hub.split: f"hf://datasets/{hub.repository}/{hub.file}"} if files else None,
            split=hub.split,
            **({"delimiter": "\t"} if files else {}),
        )
        for name, feature in table.features.items():
            if isinstance(feature, datasets.Image):
                table = table.cast_column(name, datasets.Image(decode=False))
        for number, raw in enumerate(table, 1):
            place = f"{config or hub.split}, row {number}"
            yield Row(Path(hub.repository), place, {k: v for k, v in raw.items() if v is not None})


def _parquet_rows(path: Path) -> Iterator[Row | Problem]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for raw in batch.to_pylist():
                    number += 1
                    yield Row(
                        path, f"row {number}", {k: v for k, v in raw.items() if v is not None}
                    )
    except (pa.ArrowException, OSError) as error:
        message = f"{error}. The file was read no further: fetch it again."
        yield Problem(f"{path}, after row {number}", "bad_parquet", message)


def _table_rows(path: Path, delimiter: str) -> Iterator[Row | Problem]:
    csv.field_size_limit(_LONGEST_FIELD)
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            for raw in csv.DictReader(stream, delimiter=delimiter, strict=True):
                number += 1
                held: dict[str, Any] = {k: v for k, v in raw.items() if k and v}
                yield Row(path, f"row {number}", held)
    except (csv.Error, UnicodeDecodeError) as error:
        message = f"{error}. The file was read no further: fetch it again."
        yield Problem(f"{path}, after row {number}", "bad_table", message)
