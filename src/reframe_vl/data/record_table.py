"""A record file as a memory-mapped Arrow table, made when the file is first read.

Beside ``FILE`` stands the folder ``.FILE.cache``, or where that cannot be written one in the user's
cache. ``records.arrow`` has a row for each line: the columns that records are chosen by, and the
record as JSON, without what only people read; ``sum`` is its checksum. ``checked`` says of which
rows the media were found to be those described. All are made anew when the record file changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.records import Record, parsed_lines
from reframe_vl.data.report import Problem
from reframe_vl.data.validation import annotation_problems

logger = logging.getLogger(__name__)

_VERSION = "2"
"""Of the table's layout and of what is checked when it is made."""

_SCHEMA = pa.schema(
    [
        ("line", pa.int64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("modality", pa.string()),
        ("applicability", pa.string()),
        ("media", pa.uint64()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("record", pa.binary()),
    ]
)
_ROWS_AT_ONCE = 4096
_CHUNK = 1 << 20
_ONLY_TO_READ = {"raw": {}, "audit": (), "tool_calls": (), "native_encoding": ""}
"""What a sample does not need and what makes records long."""

Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecordTable:
    """The rows of a record file, usable ones and others.

    Attributes:
        path: The record file.
        table: Memory-mapped. ``media`` numbers the media file; ``reason`` and ``message`` say why a
            row cannot be used, whatever its media are, and are null where it can.
        checked: By row: its media were found to be those described.
    """

    path: Path
    table: pa.Table
    checked: npt.NDArray[np.bool_]
    _folder: Path
    _stamp: str

    def record(self, row: int) -> Record:
        """The record of a usable row, without what only people read."""
        return Record.model_validate_json(self.table["record"][row].as_py())

    def where(self, row: int) -> str:
        """How messages name a row."""
        line, name = (self.table[column][row].as_py() for column in ("line", "id"))
        return f"{self.path}, line {line}" + ("" if name is None else f", record {name}")

    def problem(self, row: int) -> Problem:
        """Why an unsound row cannot be used."""
        reason, message = (self.table[column][row].as_py() for column in ("reason", "message"))
        return Problem(self.where(row), reason, message)

    def keep_checked(self, rows: Sequence[int]) -> None:
        """Writes down that the media of these rows, too, are right."""
        self.checked[rows] = True
        part = self._folder / f"checked.{os.getpid()}.part"
        part.write_bytes(self._stamp.encode() + self.checked.tobytes())
        part.replace(self._folder / "checked")

    @cached_property
    def is_read(self) -> npt.NDArray[np.bool_]:
        """By row: it is a record."""
        return self.table["source"].is_valid().to_numpy()

    @cached_property
    def is_unsound(self) -> npt.NDArray[np.bool_]:
        """By row: it cannot be used, whatever its media are."""
        return self.table["reason"].is_valid().to_numpy()


@contextmanager
def opened_table(path: Path) -> Iterator[RecordTable]:
    """Opens the table of a record file, and makes it where there is none.

    While it is open other processes wait: of the ranks of a run one reads the file, and its media.
    """
    folder = _cache_folder(path)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = _stamp(path)
        file = folder / "records.arrow"
        table = _mapped(file, stamp)
        if table is None:
            logger.info("%s: is read in full.", path)
            _write(path, file, stamp)
            table = _mapped(file, stamp)
        assert table is not None
        yield RecordTable(path, table, _checked(folder, stamp, len(table)), folder, stamp)


def _cache_folder(path: Path) -> Path:
    folder = path.with_name(f".{path.name}.cache")
    if not os.access(folder if folder.is_dir() else path.parent, os.W_OK):
        name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "reframe_vl" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise OSError(
            f"{path}: what is found out about it can be kept neither beside it nor in {folder} "
            f"({error}). Set the environment variable XDG_CACHE_HOME to a folder that can be "
            "written."
        ) from error
    return folder


def _stamp(path: Path) -> str:
    stat = path.stat()
    known = [_VERSION, EVIDENCE_VERSION, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _mapped(file: Path, stamp: str) -> pa.Table | None:
    """The table, or None where there is none of this record file, or where it is damaged."""
    # Before Arrow sees it: a flipped bit may end the process, or give other records.
    try:
        kept = _sum_file(file).read_text("ascii", errors="replace").split()
        if not file.is_file() or kept[:1] != [stamp]:
            return None
        if kept[1:] != [_sum(file)]:
            logger.warning("%s is damaged: it is made anew from the record file.", file)
            return None
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowInvalid):
        return None


def _sum_file(file: Path) -> Path:
    return file.with_name("sum")


def _sum(file: Path) -> str:
    """A checksum that is fast enough to be asked for at each opening."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def _checked(folder: Path, stamp: str, size: int) -> npt.NDArray[np.bool_]:
    file = folder / "checked"
    content = file.read_bytes() if file.is_file() else b""
    if len(content) != len(stamp) + size or not content.startswith(stamp.encode()):
        return np.zeros(size, bool)
    return np.frombuffer(content, np.uint8, offset=len(stamp)) == 1


# --------------------------------------------------------------------------- making it


def _write(path: Path, file: Path, stamp: str) -> None:
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        with pa.ipc.new_file(str(part), _SCHEMA) as writer:
            rows: list[dict[str, Any]] = []
            for row in _rows(path):
                rows.append(row)
                if len(rows) == _ROWS_AT_ONCE:
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, _SCHEMA))
                    rows = []
            writer.write_batch(pa.RecordBatch.from_pylist(rows, _SCHEMA))
        # Should this be killed in between, the sum is not the file's, and it is made anew.
        part.replace(file)
        part.write_text(f"{stamp} {_sum(file)}\n", "ascii")
        part.replace(_sum_file(file))
    finally:
        part.unlink(missing_ok=True)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    media_number = _media_numbers(path.parent)
    for number, record in parsed_lines(path):
        if isinstance(record, Problem):
            yield {"line": number, "reason": record.reason, "message": record.message}
            continue
        odd = record.sample_problem()
        if odd is None:
            odd = next(annotation_problems(record), None)
        yield {
            "line": number,
            "id": record.id,
            "source": record.source,
            "modality": record.modality.value,
            "applicability": record.applicability,
            "media": media_number(record.media.path),
            "reason": None if odd is None else odd[0],
            "message": None if odd is None else odd[1],
            "record": record.model_copy(update=_ONLY_TO_READ).model_dump_json().encode(),
        }


def _media_numbers(root: Path) -> Callable[[str], int]:
    """Numbers media files: the same however a path is spelled, and where the folder was moved.

    Args:
        root: The folder of the record file.
    """
    real_root = os.path.realpath(root)

    @cache
    def number(path: str) -> int:
        try:
            real = os.path.realpath(root / path)
        except ValueError:  # No file can have such a name.
            real = os.path.join(real_root, path)
        relative = os.path.relpath(real, real_root)
        name = real if relative.split(os.sep)[0] == os.pardir else relative
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big")

    return number
