"""What the long experiments share: their options, and how their runs are made and reported."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import common
from mini_rows import ProtocolError, Rows
from side_by_side import Children, work_off

Work = Callable[[str, Children], None]


def arguments(description: str) -> argparse.ArgumentParser:
    """The options of an experiment of many runs."""
    parser = common.arguments(description)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--report-only", action="store_true", help="of the rows that there are")
    return parser


def carry_out(
    args: argparse.Namespace,
    names: Sequence[str],
    rows: Rows,
    begin: Callable[[], Work],
    report: Callable[[], None],
) -> None:
    """Makes the runs that have no row yet, and writes the report of what there is.

    Args:
        args: As parsed.
        names: Of all runs, in the order in which they are begun.
        rows: The finished ones.
        begin: Holds the protocol at hand against that of the rows, and gives what makes a run.
        report: Writes it.

    Raises:
        SystemExit: A run failed, or rows and protocol do not belong together.
    """
    fine = True
    try:
        if not args.report_only:
            work = begin()
            missing = [name for name in names if not rows.has(name)]
            fine = work_off(missing, work, args.jobs, args.minutes)
        report()
    except ProtocolError as error:
        raise SystemExit(str(error)) from None
    if not fine:
        raise SystemExit(1)
