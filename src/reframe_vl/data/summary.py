"""The table that a build ends with: what became of the rows of each source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rich.table import Table

from reframe_vl.data.pipeline import Disposition
from reframe_vl.data.report import Report
from reframe_vl.data.stages.base import adapter_of

Labels: TypeAlias = Counter[tuple[str, str, str]]
"""How many records were kept, by (adapter, modality, applicability)."""


def summary_table(
    title: str,
    reports: Mapping[str, Report],
    found: Sequence[Disposition],
    labels: Labels,
) -> Table:
    """One column a source: rows in, kept by label, dropped by stage and reason, and odd but kept.

    Args:
        reports: What was said when each source was read, by its name.
        found: What became of the records that were read.
    """
    columns = [_counts(name, report, found, labels) for name, report in reports.items()]
    table = Table(title=title, title_justify="left")
    table.add_column("rows")
    for name in reports:
        table.add_column(name, justify="right")
    for label in _in_order(columns):
        table.add_row(label, *(str(column.get(label, 0)) for column in columns))
    return table


def _counts(
    name: str, report: Report, found: Sequence[Disposition], labels: Labels
) -> dict[str, int]:
    # An adapter may give records the name of the set that they came from; ids keep its own.
    dropped = [d for d in found if adapter_of(d.id) == name and d.verdict == "dropped"]
    counts = {
        "in": report.num_kept + report.num_left_out,
        "kept": report.num_kept - len(dropped),
    }
    for (adapter, modality, label), number in sorted(labels.items()):
        if adapter == name:
            counts[f"  {modality}, {label}"] = number
    counts["dropped"] = report.num_left_out + len(dropped)
    reasons = Counter(f"  {p.stage}: {p.reason}" for p in report.problems if not p.kept)
    reasons.update(f"  {d.stage}: {d.reason}" for d in dropped)
    counts |= dict(reasons.most_common())
    odd = Counter(f"  {p.stage}: {p.reason} (kept)" for p in report.problems if p.kept)
    return counts | dict(odd.most_common())


def _in_order(columns: Sequence[Mapping[str, int]]) -> list[str]:
    """The labels of all columns: those of a column stay in their order."""
    labels: list[str] = []
    for column in columns:
        at = 0
        for label in column:
            if label in labels:
                at = labels.index(label) + 1
            else:
                labels.insert(at, label)
                at += 1
    return labels
