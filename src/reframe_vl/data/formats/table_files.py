"""Rows of Parquet files, and of the same in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reframe_vl.data.formats.json_files import json_rows
from reframe_vl.data.formats.rows import Row
from reframe_vl.data.report import Problem

_ROWS_AT_ONCE = 256


def table_rows(path: Path) -> Iterator[Row | Problem]:
    """The rows of a Parquet file, of JSON lines, or of a JSON array."""
    if path.suffix.lower() != ".parquet":
        yield from json_rows(path)
        return
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for raw in batch.to_pylist():
                    number += 1
                    yield _row(path, f"row {number}", raw)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        message = f"{error}. The file was read no further: fetch it again."
        yield Problem(f"{path}, after row {number}", "bad_parquet", message)


def _row(path: Path, place: str, raw: dict[str, Any]) -> Row | Problem:
    held = _without_bytes(raw)
    try:
        json.dumps(held)
    except TypeError as error:
        message = f"a value of it cannot be written as JSON ({error}). Convert the column to text."
        return Problem(f"{path}, {place}", "bad_row", message)
    return Row(path, place, held)


def _without_bytes(value: Any) -> Any:
    """Media that are held in the file are left out: a record names files."""
    if isinstance(value, dict):
        return {key: _without_bytes(v) for key, v in value.items() if not isinstance(v, bytes)}
    return [_without_bytes(v) for v in value] if isinstance(value, list) else value
