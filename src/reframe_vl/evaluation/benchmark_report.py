"""The results of benchmarks for people: Markdown, and one picture."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reframe_vl.evaluation.benchmark_results import Entry, shown

logger = logging.getLogger(__name__)

Curves = dict[str, list[tuple[int, float]]]
"""Points of (step, value) by name."""

_REWARD = re.compile(r"^rollouts/(reward(?:/.+)?)$")
_MAX_CURVES = 8
_UPRIGHT_LABELS = 5
_COLOURS = colormaps["tab20"]


def write_report(
    report: Mapping[str, Any], out: Path, curves: Mapping[str, Sequence[tuple[int, float]]]
) -> None:
    """Writes ``report.md`` and ``report.png`` into a folder.

    Args:
        report: What results.json holds.
        curves: Reward components over training; none leaves that part of the picture out.
    """
    figure(report, curves).savefig(out / "report.png", dpi=110)
    (out / "report.md").write_text(markdown(report))


def reward_curves(run: Path) -> Curves:
    """Reward components over the steps of a training run, from its TensorBoard events.

    Where there are none: the means of the rewards in its rollouts' lines.
    """
    curves: Curves = {}
    for folder in sorted({path.parent for path in run.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if found := _REWARD.match(tag):
                points = [(event.step, event.value) for event in events.Scalars(tag)]
                curves.setdefault(found[1], []).extend(points)
    if not curves:
        curves = _of_rollouts(run / "rollouts")
    return {name: sorted(points) for name, points in curves.items()}


def _of_rollouts(folder: Path) -> Curves:
    curves: Curves = {}
    for path in sorted(folder.glob("step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        sums: dict[str, list[float]] = {}
        for line in path.read_bytes().splitlines():
            try:
                rewards = dict(json.loads(line).get("rewards") or {})
            except (ValueError, TypeError, AttributeError):
                logger.warning("%s has a line that cannot be read: it is left out.", path)
                continue
            for name, value in rewards.items():
                if isinstance(value, int | float):
                    sums.setdefault(name, []).append(value)
        for name, values in sums.items():
            curves.setdefault(name, []).append((step, sum(values) / len(values)))
    return curves


# ------------------------------------------------------------------ Markdown


def markdown(report: Mapping[str, Any]) -> str:
    """All measures as tables."""
    lines = [
        "# Benchmarks",
        "",
        "95% intervals; items of one medium are drawn together.",
        "",
    ]
    benchmarks = report["benchmarks"]
    conditions = _conditions(report)
    lines += _table(
        ["benchmark", "measure", "items", *conditions],
        [
            [
                name,
                one["primary"],
                str(one["items"]),
                *(shown(_primary(one, condition)) for condition in conditions),
            ]
            for name, one in benchmarks.items()
        ]
        + (
            [["**mean**", "", "", *(shown(report["mean"].get(c)) for c in conditions)]]
            if len(benchmarks) > 1
            else []
        ),
    )
    lines += ["", "![Results](report.png)", ""]
    for name, one in benchmarks.items():
        lines += [f"## {name}", ""]
        if one["judge"] is None and one["open_items"]:
            lines += ["Without a judge: open answers count by their words alone.", ""]
        lines += _of_benchmark(one)
    return "\n".join(lines) + "\n"


def _of_benchmark(one: Mapping[str, Any]) -> list[str]:
    sections = one["conditions"]
    measures = list(dict.fromkeys(m for s in sections.values() for m in s["measures"]))
    behaviour = ["call_rate", "calls_per_answer", "visual_tokens", "grounding_iou", "no_answer"]
    rows = [[m, *(shown(s["measures"].get(m)) for s in sections.values())] for m in measures]
    rows += [[b, *(shown(s[b]) for s in sections.values())] for b in behaviour]
    rows += [["items", *(str(s["items"]) for s in sections.values())]]
    lines = _table(["", *sections], rows)
    contrasts = [(n, e) for n, e in one.items() if _is_contrast(n) and e is not None]
    if contrasts:
        lines += ["", *_table(["contrast", "value"], [[n, shown(e)] for n, e in contrasts])]
    for name, section in sections.items():
        if section["left_out"]:
            counts = ", ".join(f"{n} {why}" for why, n in section["left_out"].items())
            lines += ["", f"Left out of {name}: {counts}."]
    if sampled := one.get("sampled"):
        rows = [[f"avg@{sampled['samples']} {m}", shown(e)] for m, e in sampled["measures"].items()]
        rows += [[f"pass@{k}", shown(e)] for k, e in sampled["pass_at_k"].items()]
        lines += ["", *_table([f"sampled, {sampled['items']} items", "value"], rows)]
    for name, part in (one.get("against") or {}).items():
        lines += [
            "",
            f"Against the other checkpoint, {name}, {part['items']} items: {len(part['gained'])} "
            f"gained, {len(part['lost'])} lost, P = {part['p_value']:.3g} (sign flips by medium).",
            "",
            *_table(
                ["difference", "value"], [[m, shown(e)] for m, e in part["differences"].items()]
            ),
        ]
    return [*lines, ""]


def _is_contrast(name: str) -> bool:
    return name.startswith(("tool_gain", "observation_dependence", "gain", "harm"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---' for _ in head)} |",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def _conditions(report: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(c for b in report["benchmarks"].values() for c in b["conditions"]))


def _primary(one: Mapping[str, Any], condition: str) -> Entry:
    found: Entry = one["conditions"].get(condition, {}).get("measures", {}).get(one["primary"])
    return found


# ------------------------------------------------------------------ picture


def figure(report: Mapping[str, Any], curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Accuracy bars, contrasts, cost against accuracy, and rewards over training."""
    bars = len(report["benchmarks"]) * len(_conditions(report))
    drawn = Figure(figsize=(max(15.0, 6.0 + 0.35 * bars), 9.0), layout="constrained")
    axes = drawn.subplot_mosaic([["bars", "bars", "contrasts"], ["tokens", "calls", "rewards"]])
    _bars(axes["bars"], report)
    _contrasts(axes["contrasts"], report)
    _costs(axes["tokens"], report, "visual_tokens", "visual tokens an answer")
    _costs(axes["calls"], report, "calls_per_answer", "calls an answer")
    _legend_of_costs(axes["calls"], report)
    _rewards(axes["rewards"], curves)
    return drawn


def _bars(ax: Axes, report: Mapping[str, Any]) -> None:
    conditions, benchmarks = _conditions(report), report["benchmarks"]
    width = 0.8 / max(len(conditions), 1)
    for number, condition in enumerate(conditions):
        for place, one in enumerate(benchmarks.values()):
            entry = _primary(one, condition)
            if entry is None:
                continue
            x = place + (number - (len(conditions) - 1) / 2) * width
            ax.bar(x, entry["value"], width * 0.92, color=f"C{number}")
            ax.errorbar(x, entry["value"], _error(entry), color="black", capsize=3, linewidth=1)
    for number, condition in enumerate(conditions):
        ax.bar(0, 0, color=f"C{number}", label=condition)
    labels = [
        name if one["primary"] == "accuracy" else f"{name}\n({one['primary']})"
        for name, one in benchmarks.items()
    ]
    many = len(labels) > _UPRIGHT_LABELS
    ax.set_xticks(range(len(labels)), labels)
    for label in ax.get_xticklabels() if many else ():
        label.set(rotation=35, ha="right", rotation_mode="anchor")
    ax.set(ylim=(0, 1), ylabel="primary measure", title="Accuracy")
    if conditions:
        ax.legend(fontsize=8, frameon=False, ncols=len(conditions), loc="upper right")


def _contrasts(ax: Axes, report: Mapping[str, Any]) -> None:
    short = {"tool_gain": "TG", "observation_dependence": "OD"}
    rows = [
        (name, contrast, entry)
        for wanted in short
        for name, one in report["benchmarks"].items()
        for contrast, entry in one.items()
        if contrast.partition("@")[0] == wanted and entry is not None
    ]
    for place, (_, contrast, entry) in enumerate(rows):
        colour = "C2" if contrast.startswith("tool_gain") else "C4"
        ax.errorbar(entry["value"], place, xerr=_error(entry), fmt="o", color=colour, capsize=3)
    ax.axvline(0, color="grey", linewidth=0.8)
    labels = []
    for name, contrast, _ in rows:
        kind, at, budget = contrast.partition("@")
        labels.append(f"{name}: {short[kind]}{at}{budget}")
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    title = "Tool gain (TG), observation dependence (OD)"
    ax.set(xlabel="difference of the primary measure", title=title)
    if not rows:
        _nothing(ax, "no arms to contrast")


def _costs(ax: Axes, report: Mapping[str, Any], cost: str, label: str) -> None:
    """A colour a benchmark, a mark a condition, a line from one condition to the next."""
    for number, one in enumerate(report["benchmarks"].values()):
        points = []
        for mark, condition in zip(_marks(), _conditions(report), strict=False):
            section, entry = one["conditions"].get(condition), _primary(one, condition)
            if section is None or entry is None or section[cost] is None:
                continue
            points.append((section[cost]["value"], entry["value"]))
            colour = _COLOURS(number % _COLOURS.N)
            x_error, y_error = _error(section[cost]), _error(entry)
            ax.errorbar(
                *points[-1], y_error, x_error, fmt=mark, color=colour, linewidth=1, markersize=6
            )
        if points:
            ax.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.5)
    ax.set(ylim=(0, 1), xlabel=label, ylabel="primary measure", title=f"Accuracy against {label}")


def _legend_of_costs(ax: Axes, report: Mapping[str, Any]) -> None:
    for number, name in enumerate(report["benchmarks"]):
        ax.plot([], [], color=_COLOURS(number % _COLOURS.N), label=name)
    for mark, condition in zip(_marks(), _conditions(report), strict=False):
        ax.plot([], [], mark, color="grey", label=condition)
    ax.legend(fontsize=7, frameon=False, ncols=2)


def _marks() -> Iterator[str]:
    return cycle("osD^vP*X<>")


def _rewards(ax: Axes, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for name, points in list(curves.items())[:_MAX_CURVES]:
        steps, values = zip(*points, strict=True)
        ax.plot(steps, values, label=name, linewidth=1.2)
    ax.set(xlabel="step", ylabel="mean over rollouts", title="Reward components over training")
    if curves:
        _legend(ax)
    else:
        _nothing(ax, "no training run beside the checkpoint")


def _error(entry: Mapping[str, float]) -> list[list[float]]:
    value = entry["value"]
    return [[max(value - entry["low"], 0.0)], [max(entry["high"] - value, 0.0)]]


def _legend(ax: Axes) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False)


def _nothing(ax: Axes, why: str) -> None:
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, color="grey")
    ax.set_xticks([])
    ax.set_yticks([])
