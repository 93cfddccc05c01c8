"""Where a build may write: checked before it begins, since it may take hours."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from reframe_vl.data.contact_sheet import is_contact_sheet
from reframe_vl.data.report import RecordError


def page_of(out: Path) -> Path:
    """The page to look at, beside the record file."""
    return out.with_suffix(".html")


def check_output(
    path: Path, read: Sequence[Path], folders: Sequence[Path], work: Path | None, has_page: bool
) -> None:
    """Refuses a place for the record file that is taken, or that cannot be written.

    Args:
        path: The record file; its folder is made.
        read: What is read.
        folders: Those of them of which all files are read that are named like a record file.
        work: The folder of the stages.
        has_page: Whether a page to look at is written too.

    Raises:
        RecordError: Another place has to be given.
    """
    out = path.resolve()
    if out.is_dir():
        raise RecordError(f"out={path} is a folder: give the record file, FILE.jsonl.")
    if out.exists() and any(file.exists() and out.samefile(file) for file in read):
        raise RecordError(
            f"out={path} is one of the files to read and would be overwritten: give the record "
            "file a name of its own, FILE.jsonl."
        )
    if out.suffix != ".jsonl":
        raise RecordError(
            f"out={path} is no name of a record file, and what has it would be overwritten: give "
            "FILE.jsonl."
        )
    for folder in folders:
        if out.parent == folder.resolve():
            raise RecordError(
                f"out={path} is in the folder of annotations {folder} and would be read as one of "
                "them the next time: give another folder."
            )
    if work is not None and out.is_relative_to(work.resolve()):
        raise RecordError(
            f"out={path} is in work={work}, which is for the files of the stages: give a record "
            "file outside of it."
        )
    page = page_of(path)
    if has_page and page.exists() and not is_contact_sheet(page):
        raise RecordError(
            f"{page} is no page of an earlier build, and the page to look at would overwrite it: "
            "give out= another name, or sheet=0."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise RecordError(
            f"out={path} cannot be written ({error}): give a folder that can be written."
        ) from error
