"""Rows as a source publishes them, and what is said of odd ones."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from reframe_vl.data.record_parts import AuditEntry
from reframe_vl.data.report import Problem

STAGE = "pool"
"""The stage of the pipeline that sources belong to."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row, verbatim.

    Attributes:
        path: The annotation file.
        place: Where in the file, such as ``line 7``.
        raw: The row as JSON; what the source wrote, nothing converted.
    """

    path: Path
    place: str
    raw: dict[str, Any]

    @property
    def where(self) -> str:
        """The file and the place in it."""
        return f"{self.path}, {self.place}"


class Refused(Exception):
    """A row that can be no record.

    Attributes:
        reason: A short code to count by.
        message: A sentence with the remedy.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def at(self, where: str) -> Problem:
        """The problem to report."""
        return Problem(where, self.reason, self.message)


def kept(reason: str, note: str) -> AuditEntry:
    """Something odd that changed nothing."""
    return AuditEntry(stage=STAGE, verdict="kept", reason=reason, note=note)


def changed(reason: str, note: str) -> AuditEntry:
    """Something odd that was mended."""
    return AuditEntry(stage=STAGE, verdict="changed", reason=reason, note=note)


def _as_text(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Text = Annotated[str, BeforeValidator(_as_text)]
"""Text; a number in its place is written out."""

Number = Annotated[float, BeforeValidator(_no_truth)]
"""A finite number; text that reads as one counts."""

AnyNumber = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_no_truth)]
"""A number that need not be finite."""

Whole = Annotated[int, BeforeValidator(_no_truth), Field(gt=-(2**63), lt=2**63)]
"""A whole number, no larger than floats hold; text that reads as one counts."""


class RowFields(BaseModel):
    """The fields that an adapter reads from a row; others may stand beside them."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


def split_of(path: Path) -> str:
    """The split that a file's name tells, such as ``val`` of ``highlight_val_release.jsonl``."""
    found = re.search(r"(?<![a-z])(train|val|test)(?![a-z])|(train|val|test)", path.stem.lower())
    return (found[1] or found[2]) if found else "unknown"


def check_path(path: Path) -> Path:
    """The path itself.

    Raises:
        Refused: It is not of UTF-8, which record files are written in.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise Refused(
            "bad_name", f"the path {shown} is not of UTF-8. Rename the file or its folder."
        ) from error
    return path
