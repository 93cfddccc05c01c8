"""The learning curves of the GD-GRPO experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from mini_claims import SETTINGS, title_of
from mini_runs import ABLATIONS, FULL, OUTCOME, STRONG, Run
from mini_statistics import KEYS, Measurements

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "accuracy": "accuracy with tools",
    "conflict": "accuracy on the conflict set",
    "tool_gain": "tool gain",
    "observation_dependence": "observation dependence",
}
COLORS = {FULL: "tab:blue", OUTCOME: "tab:orange"} | dict(
    zip(ABLATIONS, ("tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink"), strict=True)
)


def plot(measurements: Measurements, path: Path) -> None:
    """A row of panels for each setting with runs, and one for GD-GRPO without its parts."""
    pair, parts = (OUTCOME, FULL), (FULL, *ABLATIONS)
    lines: list[tuple[str, tuple[str, float], tuple[str, ...]]] = [
        *((title_of(setting), world, pair) for setting, world in SETTINGS.items()),
        (f"image {STRONG}, parts", SETTINGS[str(STRONG)], parts),
    ]
    lines = [line for line in lines if any(measurements.of(*line[1], m) for m in line[2])]
    if not lines:
        return
    figure, axes = plt.subplots(
        len(lines), len(PANELS), figsize=(15, 3.2 * len(lines)), squeeze=False, sharex=True
    )
    for axes_of_line, (title, world, methods) in zip(axes, lines, strict=True):
        for axis, (name, label) in zip(axes_of_line, PANELS.items(), strict=True):
            for method in methods:
                runs = measurements.of(*world, method)
                # Parts were left out with the first seed only.
                if methods == parts:
                    runs = [run for run in runs if run.seed == 0]
                if runs:
                    _draw(axis, measurements, runs, name, band=methods == pair)
            axis.set_title(f"{label} ({title})", fontsize=10)
            axis.set_ylim(-0.3 if name in ("tool_gain", "observation_dependence") else -0.05, 1.05)
            axis.grid(alpha=0.3)
            axis.set_xlabel("step")
        axes_of_line[0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw(axis: Any, measurements: Measurements, runs: list[Run], name: str, band: bool) -> None:
    """The mean over runs of a measure, by step."""
    steps: list[int] = []
    curves = []
    for run in runs:
        points = measurements[run].points
        steps = sorted(points)
        terms = [points[step][KEYS[name]] for step in steps]
        curves.append([sum(t.values()) / len(t) for t in terms])
    columns = list(zip(*curves, strict=True))
    color, method = COLORS[runs[0].method], runs[0].method
    axis.plot(steps, [sum(c) / len(c) for c in columns], color=color, label=method)
    if band:
        axis.fill_between(
            steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15
        )
