"""What was odd about rows that were read: nothing is lost silently."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


class RecordError(ValueError):
    """A row that cannot be used; the message names the row, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One odd row.

    Attributes:
        where: The file and line, or the record's id.
        reason: A short code to count by.
        message: A sentence with the remedy.
        kept: Whether the row is used all the same.
        stage: Of the pipeline, where one found it.
    """

    where: str
    reason: str
    message: str
    kept: bool = False
    stage: str = "pool"

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.reason}{', kept' if self.kept else ''}]"


@dataclass
class Report:
    """Collects the problems of one reading.

    Attributes:
        strict: Raise at the first problem.
        log_level: At which each problem is logged.
        num_kept: Rows that are used.
        problems: In the order of the rows.
    """

    strict: bool = False
    log_level: int = logging.WARNING
    num_kept: int = 0
    problems: list[Problem] = field(default_factory=list)
    _left_out: set[str] = field(default_factory=set, repr=False)

    def add(self, problem: Problem) -> None:
        """Notes and logs a problem.

        Raises:
            RecordError: The report is strict.
        """
        if self.strict:
            raise RecordError(str(problem))
        logger.log(self.log_level, "%s", problem)
        self.problems.append(problem)
        if not problem.kept:
            self._left_out.add(problem.where)

    @property
    def num_left_out(self) -> int:
        """Rows that are not used."""
        return len(self._left_out)

    def count_by_reason(self) -> dict[tuple[str, bool], int]:
        """Problems by (reason, whether the row is kept), the most frequent first."""
        counts = Counter((problem.reason, problem.kept) for problem in self.problems)
        return dict(counts.most_common())
