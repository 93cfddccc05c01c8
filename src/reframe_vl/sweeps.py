"""What the runs of a sweep gave, side by side: ``python -m reframe_vl.sweeps logs/EXPERIMENT``.

A row is a setting; its runs differ in the seed alone, and it shows their mean and their standard
deviation. Settings are told apart by the overrides that are not the same in all runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from reframe_vl.runs import IDENTITY, POLICY, ConfigError, read_results

MEASURES = ("accuracy.tools", "accuracy.no_tools", "tool_gain", "observation_dependence")
"""Of the results; those that none of the runs has are left out."""

REPEATED = ("seed",)
"""Overrides that repeat a setting, and do not make another one of it."""


@dataclass(frozen=True)
class Row:
    """A setting.

    Attributes:
        overrides: Those that differ between settings.
        runs: The measures of each of its runs that is finished, with its seed; one that is not
            evaluated (``evaluate=false``) has none.
        unfinished: The other runs.
    """

    overrides: dict[str, str]
    runs: list[tuple[str, dict[str, float]]]
    unfinished: int

    def values(self, measure: str) -> list[float]:
        """Of the runs that have it."""
        return [found[measure] for _, found in self.runs if measure in found]


def number(results: Mapping[str, Any], name: str) -> float | None:
    """A measure of a run's results by its dotted name; None where there is none.

    >>> number({"accuracy": {"tools": {"value": 0.5, "low": 0.4, "high": 0.6}}}, "accuracy.tools")
    0.5
    """
    found: Any = results
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    value = found.get("value") if isinstance(found, Mapping) else found
    return float(value) if isinstance(value, int | float) else None


def objective(cfg: DictConfig, results: Mapping[str, Any]) -> float | None:
    """The number that ``cfg.objective`` names, for sweeps that look for the best; None without one.

    Raises:
        ConfigError: It is named, but the results have none.
    """
    name = cfg.get("objective")
    if name is None:
        return None
    value = number(results, name)
    if value is None:
        raise ConfigError(
            f"objective={name} is no number of the results, which have "
            f"{', '.join(sorted(results)) or 'nothing (evaluate=false)'}: name a measure of "
            "docs/configuration.md, such as accuracy.tools or tool_gain."
        )
    return value


def gather(folders: Iterable[Path], measures: Sequence[str] = MEASURES) -> list[Row]:
    """The settings of all runs in some folders, in the order of their first runs.

    Args:
        folders: Run directories, or folders of them.
        measures: Read from their results.

    Raises:
        FileNotFoundError: A folder holds no run.
    """
    runs: list[tuple[dict[str, str], dict[str, Any] | None]] = []
    for folder in folders:
        # No deeper: rollouts have many files.
        identities = [p for depth in ("", "*/", "*/*/") for p in folder.glob(depth + IDENTITY)]
        if not identities:
            raise FileNotFoundError(
                f"{folder} holds no run: give logs/EXPERIMENT, or a folder of run directories."
            )
        for path in sorted(identities):
            pairs = [o.partition("=")[::2] for o in json.loads(path.read_text())["overrides"]]
            runs.append((dict(pairs), _results(path.parent)))
    names = dict.fromkeys(name for overrides, _ in runs for name in overrides)
    differing = [n for n in names if len({overrides.get(n) for overrides, _ in runs}) > 1]
    rows: dict[tuple[str, ...], Row] = {}
    for overrides, results in runs:
        kept = {n: overrides.get(n, "") for n in differing if n not in REPEATED}
        place = tuple(kept.values())
        row = rows.setdefault(place, Row(kept, [], 0))
        if results is None:
            rows[place] = replace(row, unfinished=row.unfinished + 1)
        else:
            found = {name: number(results, name) for name in measures}
            known = {name: value for name, value in found.items() if value is not None}
            row.runs.append((overrides.get("seed", ""), known))
    return list(rows.values())


def _results(run: Path) -> dict[str, Any] | None:
    """Of a run; empty if it ends without, None if it has not ended."""
    results = read_results(run)
    if results is not None or not (run / POLICY).is_dir():
        return results
    return None if OmegaConf.load(run / "config.yaml").evaluate else {}


def summary(values: Sequence[float]) -> str:
    """The mean, and the standard deviation of several runs.

    >>> summary([0.5, 0.7]), summary([0.5]), summary([])
    ('0.600 ± 0.141', '0.500', '-')
    """
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def table(rows: Sequence[Row], sort: str) -> Table:
    """The settings, best first."""

    def rank(row: Row) -> float:
        values = row.values(sort)
        return -statistics.fmean(values) if values else math.inf

    names = list(rows[0].overrides) if rows else []
    shown = dict.fromkeys(name for row in rows for _, found in row.runs for name in found)
    result = Table(title=f"{len(rows)} settings, by {sort}; mean ± standard deviation over seeds")
    for name in (*names, "runs", *shown):
        result.add_column(name)
    for row in sorted(rows, key=rank):
        waiting = f" (+{row.unfinished} unfinished)" if row.unfinished else ""
        result.add_row(
            *(row.overrides[name] for name in names),
            f"{len(row.runs)}{waiting}",
            *(summary(row.values(name)) for name in shown),
        )
    return result


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a run and measure, for other programs."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*(rows[0].overrides if rows else ()), "seed", "measure", "value"])
        for row in rows:
            for seed, found in row.runs:
                for measure, value in found.items():
                    writer.writerow([*row.overrides.values(), seed, measure, value])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="reframe_vl.sweeps", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of run directories")
    parser.add_argument("--sort", default=MEASURES[0], help="sort settings by this measure")
    parser.add_argument("--csv", type=Path, help="also write each run's numbers to this file")
    given = parser.parse_args(arguments)
    try:
        rows = gather(given.folders, list(dict.fromkeys([*MEASURES, given.sort])))
    except FileNotFoundError as error:
        sys.exit(str(error))
    Console().print(table(rows, given.sort))
    if given.csv:
        write_csv(rows, given.csv)


if __name__ == "__main__":
    main()
