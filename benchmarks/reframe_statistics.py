"""Contrasts between the methods of the distillation experiment, with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mini_rows import Rows
from reframe_runs import BASE, MODALITIES, PAIRS, SHORTCUT, Run

from reframe_vl.evaluation import report
from reframe_vl.evaluation.comparison import area, combine
from reframe_vl.evaluation.outcomes import EvaluationResult
from reframe_vl.evaluation.packing import unpack
from reframe_vl.evaluation.report import Terms

MEAN = "mean"
"""Of both modalities."""
END, AREA = "end", "area"
KEYS = {
    "accuracy": ("accuracy", "tools"),
    "no_tools": ("accuracy", "no_tools"),
    "conflict": ("accuracy", "conflict"),
    "tool_gain": ("", "tool_gain"),
    "tool_gain_vs_base": ("", "tool_gain_vs_base"),
    "observation_dependence": ("", "observation_dependence"),
    "grounding_iou": ("", "grounding_iou"),
    "call_rate": ("", "call_rate"),
}
Points = dict[int, dict[tuple[str, str], Terms]]
Part = tuple[float, str, str]
"""A weight, a method and a measure."""


class Measurements:
    """The finished runs; ``specialists`` are each specialist on its own modality."""

    def __init__(self, runs: Sequence[Run], rows: Rows) -> None:
        self.missing = [run for run in runs if not rows.has(run.name)]
        self.rows = {run: rows.read(run.name) for run in runs if rows.has(run.name)}
        self._media: dict[str, dict[str, str]] = {m: {} for m in MODALITIES}
        self._points: dict[tuple[Run, str], Points] = {}
        for run in [r for r in self.rows if Run(BASE, r.base) in self.rows]:
            for modality in MODALITIES:
                self._points[run, modality] = self._measured(run, modality, rows)
        self.methods = list(dict.fromkeys(run.method for run, _ in self._points))
        for pair in PAIRS:
            if any(self._found(pair)):
                self.methods.append(pair)

    def _measured(self, run: Run, modality: str, rows: Rows) -> Points:
        items = rows.items(f"{modality}-{SHORTCUT}")
        row = self.rows[run]
        base = unpack(self.rows[Run(BASE, run.base)][modality]["final"], items)
        self._media[modality] |= base.media
        points = {0: report.measures(base, base)}
        for step, packed in row[modality]["curve"].items():
            points[int(step)] = report.measures(unpack(packed, items), base)
        if run.method != BASE:
            last = max(row["steps"], 1)
            points[last] = report.measures(unpack(row[modality]["final"], items), base)
        return points

    def _found(self, method: str) -> Iterator[tuple[int, int]]:
        """Bases and seeds that a method's runs are finished for."""
        if method in PAIRS:
            spatial, temporal = (set(self._found(name)) for name in PAIRS[method])
            yield from sorted(spatial & temporal)
            return
        yield from sorted({(r.base, r.seed) for r, _ in self._points if r.method == method})

    def points(self, method: str, base: int, seed: int, modality: str) -> Points:
        """A run's measures by step; a specialist stands for its pair on its own modality."""
        if method in PAIRS:
            method = PAIRS[method][MODALITIES.index(modality)]
        return self._points[Run(method, base, 0 if method == BASE else seed), modality]

    def contrast(
        self, parts: Sequence[Part], modality: str = MEAN, at: str = END
    ) -> dict[str, Any] | None:
        """A weighted sum of measures with its interval, over the runs that all methods have.

        Runs are paired by base and seed and items by id. The mean of both modalities weighs them
        equally, however many items each has, and media are drawn within each. None where there are
        no such runs, where one of them has no such measure, and at the area under curves that are
        none, or that have not the same steps: their areas are of different things.
        """
        trained = {method for _, method, _ in parts if method != BASE} or {BASE}
        if at == AREA and trained != {BASE} and not self._curves_compare(trained):
            return None
        shared = set.intersection(*(set(self._found(method)) for method in trained))
        runs, columns = [], []
        for base, seed in sorted(shared):
            of = MODALITIES if modality == MEAN else (modality,)
            by_modality = {
                m: combine(
                    [(w, self._terms(method, base, seed, m, name, at)) for w, method, name in parts]
                )
                for m in of
            }
            if not all(by_modality.values()):
                return None
            media = {i: key for m in of for i, key in self._media[m].items()}
            column = {i: value for terms in by_modality.values() for i, value in terms.items()}
            result = EvaluationResult({}, media, len(column), {})
            runs.append(report.Run(result, None, str(base), seed))
            columns.append(column)
        strata = {item: m for m in MODALITIES for item in self._media[m]}
        found = report.interval(runs, columns, strata) if runs else None
        return found and {**found, "runs": len(runs)}

    def _curves_compare(self, methods: set[str]) -> bool:
        """Whether all runs of some methods were measured at the same steps, also in between."""
        steps = {
            tuple(sorted(self.points(method, base, seed, modality)))
            for method in methods
            for base, seed in self._found(method)
            for modality in MODALITIES
        }
        return len(steps) == 1 and all(len(curve) > 2 for curve in steps)

    def _terms(self, method: str, base: int, seed: int, modality: str, name: str, at: str) -> Terms:
        points, key = self.points(method, base, seed, modality), KEYS[name]
        if at == END or len(points) == 1:
            return points[max(points)][key]
        return area({step: point[key] for step, point in points.items()})

    def curve(self, method: str, modality: str, name: str) -> dict[int, list[float]]:
        """A measure by step, one value a run, on the items that all of a run's points have."""
        curve: dict[int, list[float]] = {}
        for base, seed in self._found(method):
            points = self.points(method, base, seed, modality)
            measured = {step: p[KEYS[name]] for step, p in points.items() if p[KEYS[name]]}
            shared = set.intersection(*map(set, measured.values())) if measured else set()
            for step, terms in measured.items() if shared else ():
                value = sum(terms[item] for item in shared) / len(shared)
                curve.setdefault(step, []).append(value)
        return dict(sorted(curve.items()))


def difference(method: str, other: str, measure: str) -> list[Part]:
    """The parts of a paired difference."""
    return [(1.0, method, measure), (-1.0, other, measure)]
