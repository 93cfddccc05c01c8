"""Samples of a record file: chosen by what records say, split by media, read as they are drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reframe_vl.data.record_table import RecordTable, Rows, opened_table
from reframe_vl.data.report import Problem, Report
from reframe_vl.data.validation import MediaCheck
from reframe_vl.types import Sample

logger = logging.getLogger(__name__)

Column: TypeAlias = Literal["source", "modality", "applicability"]
COLUMNS: tuple[Column, ...] = ("source", "modality", "applicability")
"""What records are chosen and mixed by."""

UNKNOWN = "unknown"
"""The applicability of records without evidence."""

_NAMED = 10
"""So many samples that are left out are named in one warning."""


@dataclass(frozen=True)
class Choice:
    """Which records of a file are used.

    Attributes:
        only: Names that are used, by column; a column that is not named is not asked. Records
            without evidence have the applicability ``unknown``.
        part: With a validation share: the part for training or for validation.
        validation_share: The share of the media that is kept for validation. A media file is in one
            part, with all of its records, whatever ``only`` says.
    """

    only: Mapping[Column, Sequence[str]] = field(default_factory=dict)
    part: Literal["train", "validation"] = "train"
    validation_share: float = 0.0

    def rows(self, table: RecordTable) -> Rows:
        """The rows of a table; those that could not be read, and so have no names, too.

        Raises:
            ValueError: A name is in no record, or the share leaves a part without media.
        """
        is_read = table.is_read
        chosen = np.ones(len(is_read), bool)
        for column, wanted in self.only.items():
            names = labels(table, column)
            known = set(pc.unique(names.filter(pa.array(is_read))).to_pylist())
            if unknown := sorted(set(wanted) - known):
                raise ValueError(
                    f"No record of {table.path} has the {column} {', '.join(unknown)}; there is "
                    f"{', '.join(sorted(known)) or 'none at all'}."
                )
            chosen &= ~is_read | pc.is_in(names, pa.array(list(wanted))).to_numpy()
        if self.validation_share:
            chosen &= ~is_read | self._is_in_part(table)
        return np.flatnonzero(chosen)

    def _is_in_part(self, table: RecordTable) -> npt.NDArray[np.bool_]:
        share: object = self.validation_share
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(
                f"data.validation_share is {share!r}: give a share of the media "
                "above 0 and below 1, or 0 for none."
            )
        media = pc.fill_null(table.table["media"], 0).to_numpy()
        numbers = np.unique(media[table.is_read])
        count = max(1, round(self.validation_share * len(numbers)))
        if count >= len(numbers):
            raise ValueError(
                f"data.validation_share={self.validation_share}: {table.path} has {len(numbers)} "
                "media files, too few for two parts. Give data.evaluation_path instead."
            )
        # The numbers are hashes: the smallest of them are a fair draw that stays the same.
        is_validation = media <= numbers[count - 1]
        return is_validation if self.part == "validation" else ~is_validation


def labels(table: RecordTable, column: Column) -> pa.ChunkedArray:
    """What each row has in a column."""
    return pc.coalesce(table.table[column], pa.scalar(UNKNOWN))


class RecordSource:
    """Samples of a record file, in its order; each is read from the mapped table when it is asked.

    The first time a file is read in full, and of the media of its records headers (of a video one
    frame). What was found is kept, so that the next time it opens at once.

    Args:
        path: A JSON-lines file of records.
        limit: Use so many of the records that can be used, spread evenly over the file.
        on_error: ``raise``, or ``skip`` with a report of what was left out.
        choice: Which records are used; all by default.

    Attributes:
        report: What was left out, and why.
    """

    def __init__(
        self,
        path: str | Path,
        limit: int | None = None,
        on_error: str = "raise",
        choice: Choice | None = None,
    ) -> None:
        """Opens the file, and checks what was not checked before.

        Raises:
            FileNotFoundError: There is no such file.
            RecordError: A record cannot be used, with ``raise``.
            ValueError: It holds no usable record, or a setting cannot work.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(
                f"data.on_error is {on_error!r}: give raise, to stop at the first record that "
                "cannot be used, or skip, to leave such records out."
            )
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"No records file at {self.path}: make one with src/build_data.py, and name it "
                "with data.path=FILE.jsonl."
            )
        # A folder of media that is not there makes as many problems as there are records.
        self.report = Report(strict=on_error == "raise", log_level=logging.DEBUG)
        with opened_table(self.path) as self._table:
            self._rows = self._usable((choice or Choice()).rows(self._table), limit)
        self.report.num_kept = len(self._rows)
        for (reason, _), number in self.report.count_by_reason().items():
            first = next(p for p in self.report.problems if p.reason == reason)
            logger.warning("Records left out (%s): %d; the first: %s", reason, number, first)
        if not len(self._rows):
            firsts = "".join(f" The first problem: {p}" for p in self.report.problems[:1])
            raise ValueError(f"{self.path} holds no usable record.{firsts}")

    def _usable(self, rows: Rows, limit: int | None) -> Rows:
        """The rows that can be used; what is wrong with the others goes to the report."""
        table = self._table
        is_known_good = table.checked & ~table.is_unsound
        check = MediaCheck(self.path.parent)
        usable: list[int] = []
        try:
            for row in _spread(rows, limit).tolist():
                if len(usable) == limit:
                    break
                problem = None if is_known_good[row] else self._problem(row, check)
                if problem is None:
                    usable.append(row)
                else:
                    self.report.add(problem)
        finally:
            if not is_known_good[usable].all():
                table.keep_checked(usable)
        return np.array(sorted(usable), np.int64)

    def _problem(self, row: int, check: MediaCheck) -> Problem | None:
        if self._table.is_unsound[row]:
            return self._table.problem(row)
        odd = check.problem(self._table.record(row))
        return None if odd is None else Problem(self._table.where(row), *odd)

    def leave_out(self, problem_of: Callable[[Sample], str | None]) -> None:
        """Drops the samples that have a problem, and says how many and which.

        Raises:
            ValueError: None is left.
        """
        is_kept = np.ones(len(self._rows), bool)
        named = []
        for index, row in enumerate(self._rows.tolist()):
            problem = problem_of(self[index])
            if problem is None:
                continue
            is_kept[index] = False
            named.append(f"{self._table.where(row)}: {problem}")
            logger.debug("Left out: %s", named[-1])
        if not named:
            return
        logger.warning(
            "%s: %d of %d samples are left out; the first of them:\n%s",
            self.path,
            len(named),
            len(is_kept),
            "\n".join(named[:_NAMED]),
        )
        self._rows = self._rows[is_kept]
        if not len(self._rows):
            raise ValueError(f"No sample of {self.path} can be used; the first: {named[0]}")

    def labels(self, column: Column) -> npt.NDArray[Any]:
        """What each sample has in a column."""
        return labels(self._table, column).take(pa.array(self._rows)).to_numpy()

    def __len__(self) -> int:
        """Records."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """A record's sample."""
        return self._table.record(int(self._rows[index])).to_sample(self.path.parent)


def _spread(rows: Rows, limit: int | None) -> Rows:
    """Rows in an order whose first ``limit`` are spread evenly; the others stand in for bad ones.

    A file of several sources has one after the other: its first rows would be of one alone.
    """
    if limit is None or limit >= len(rows):
        return rows
    part = np.arange(len(rows)) * limit // len(rows)
    place = np.arange(len(rows)) - np.searchsorted(part, part)
    return rows[np.lexsort((part, place))]
