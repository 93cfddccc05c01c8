"""Contrasts between the methods of a mini experiment, with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mini_rows import Rows
from mini_runs import BASE, Run, frozen_base, other_modality

from reframe_vl.evaluation import report
from reframe_vl.evaluation.comparison import area, combine
from reframe_vl.evaluation.outcomes import EvaluationResult
from reframe_vl.evaluation.packing import unpack
from reframe_vl.evaluation.report import Terms

MARGIN = 0.05
"""What counts as a slight change of an accuracy (ours)."""

END, AREA = "end", "area"

KEYS = {
    "accuracy": ("accuracy", "tools"),
    "no_tools": ("accuracy", "no_tools"),
    "dropped": ("accuracy", "dropped"),
    "conflict": ("accuracy", "conflict"),
    "true": ("accuracy", "true"),
    "random": ("accuracy", "random"),
    "blank": ("accuracy", "blank"),
    "tool_gain": ("", "tool_gain"),
    "tool_gain_vs_base": ("", "tool_gain_vs_base"),
    "observation_dependence": ("", "observation_dependence"),
    "observation_dependence_dropped": ("", "observation_dependence_dropped"),
    "grounding_iou": ("", "grounding_iou"),
    "call_rate": ("", "call_rate"),
}
"""Measures by the names used here, and where ``reframe_vl.evaluation.report.measures`` has them."""

Part = tuple[float, str, str]
"""A weight, a method and a measure."""


def difference(method: str, other: str, measure: str) -> list[Part]:
    """The parts of a paired difference."""
    return [(1.0, method, measure), (-1.0, other, measure)]


def verdict(interval: dict[str, Any]) -> str:
    """Whether a difference that is claimed to be positive is."""
    if interval["low"] > 0:
        return "shown"
    return "reversed" if interval["high"] < 0 else "not shown"


def verdict_of_no_change(interval: dict[str, Any]) -> str:
    """Whether a difference that is claimed to be slight is."""
    if interval["low"] >= -MARGIN and interval["high"] <= MARGIN:
        return "shown"
    outside = interval["low"] > MARGIN or interval["high"] < -MARGIN
    return "reversed" if outside else "not shown"


def joint(verdicts: Iterable[str]) -> str:
    """Of a claim with several parts: shown if all are, reversed if one is."""
    found = set(verdicts)
    if "reversed" in found:
        return "reversed"
    return "shown" if found == {"shown"} else "not shown"


@dataclass(frozen=True)
class Measured:
    """A finished run: its final evaluation, and its measures by step."""

    final: EvaluationResult
    points: dict[int, dict[tuple[str, str], Terms]]

    def terms(self, measure: str, at: str) -> Terms:
        """Of each item, at the end or over the curve."""
        key = KEYS[measure]
        if at == END or len(self.points) == 1:
            return self.points[max(self.points)][key]
        return area({step: point[key] for step, point in self.points.items()})

    def values(self) -> dict[str, float | None]:
        """All measures at the end."""
        return {name: _mean(self.terms(name, END)) for name in KEYS}


class Measurements:
    """The finished runs of an experiment."""

    def __init__(self, runs: Sequence[Run], rows: Rows) -> None:
        self.missing = [run for run in runs if not rows.has(run.name)]
        self.rows = {run: rows.read(run.name) for run in runs if rows.has(run.name)}
        self._items = {run.world: rows.items(run.world) for run in self.rows}
        self._runs: dict[Run, Measured] = {}
        # Where the base of a run is still missing, the run cannot be compared with anything.
        for run in [run for run in self.rows if frozen_base(run) in self.rows]:
            self._runs[run] = self._measured(run)
        self.crossed: dict[Run, Measured] = {}
        for run, row in self.rows.items():
            if row["cross"] and other_modality(run) in self.rows:
                self.crossed[run] = self._crossed(run)

    def __getitem__(self, run: Run) -> Measured:
        return self._runs[run]

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    def of(self, modality: str, shortcut: float, method: str) -> list[Run]:
        """The finished runs of a method."""
        wanted = (modality, shortcut, method)
        return sorted(
            (run for run in self._runs if (run.modality, run.shortcut, run.method) == wanted),
            key=lambda run: (run.base, run.seed),
        )

    def contrast(
        self, modality: str, shortcut: float, parts: Sequence[Part], at: str = END
    ) -> dict[str, Any] | None:
        """A weighted sum of measures with its interval, over the runs that all methods have.

        Runs are paired by base and seed, and their items by id; the frozen base is the same for
        every seed. None where there are no such runs.
        """
        trained = {method for _, method, _ in parts if method != BASE} or {BASE}
        per_method = [
            {(run.base, run.seed) for run in self.of(modality, shortcut, method)}
            for method in sorted(trained)
        ]
        runs, columns = [], []
        for base, seed in sorted(set.intersection(*per_method)):
            measured = {
                method: self[Run(modality, shortcut, method, base, 0 if method == BASE else seed)]
                for _, method, _ in parts
            }
            columns.append(
                combine([(w, measured[method].terms(name, at)) for w, method, name in parts])
            )
            final = measured[min(trained)].final
            runs.append(report.Run(final, base_name=str(base), seed=seed))
        found = report.interval(runs, columns) if runs else None
        return found and {**found, "runs": len(runs)}

    def cross_contrast(
        self, modality: str, measure: str, minus_base: bool = False
    ) -> dict[str, Any] | None:
        """A measure of one modality's specialists on the other, or its difference to the bases."""
        runs, columns = [], []
        for run, measured in self.crossed.items():
            if run.modality != modality:
                continue
            base = self[other_modality(run)]
            parts = [(1.0, measured), *([(-1.0, base)] if minus_base else [])]
            columns.append(combine([(w, m.terms(measure, END)) for w, m in parts]))
            runs.append(report.Run(measured.final, base_name=str(run.base)))
        found = report.interval(runs, columns) if runs else None
        return found and {**found, "runs": len(runs)}

    def _measured(self, run: Run) -> Measured:
        row, items, base = self.rows[run], self._items[run.world], self._base(run)
        final = unpack(row["final"], items)
        if run.method == BASE:
            return Measured(final, {0: report.measures(base, base)})
        points = {0: report.measures(base, base)}
        for step, packed in row["curve"].items():
            points[int(step)] = report.measures(unpack(packed, items), base)
        points[_steps(row)] = report.measures(final, base)
        return Measured(final, points)

    def _crossed(self, run: Run) -> Measured:
        other = other_modality(run)
        base = self._base(other)
        final = unpack(self.rows[run]["cross"], self._items[other.world])
        return Measured(final, {_steps(self.rows[run]): report.measures(final, base)})

    def _base(self, run: Run) -> EvaluationResult:
        return unpack(self.rows[frozen_base(run)]["final"], self._items[run.world])


def _steps(row: dict[str, Any]) -> int:
    (steps,) = (o for o in row["overrides"] if o.startswith("steps="))
    return int(steps.partition("=")[2])


def _mean(terms: Terms) -> float | None:
    return sum(terms.values()) / len(terms) if terms else None
