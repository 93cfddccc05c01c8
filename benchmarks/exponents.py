"""How the cost of scoring with shared prefixes grows: measured exponents.

Forward and backward of `policy.score` on one group, as in `scoring.py`: P prompt tokens (half of
them an image), C sampled tokens each in G rollouts. One of P, C, G and the hidden size changes at a
time, the others staying at the middle of the plot; medians over repeats in turn. The exponent is
the slope of a straight line through the points in log-log scale: what the time is multiplied by, as
a power of what the quantity is multiplied by. Beside it is that of the plain forward, one row a
rollout. Float32, one thread, no gradient checkpointing. The middle is measured once for each axis:
how its rows differ shows the noise, and that second digits of an exponent mean little.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
from typing import Any

import common
import numpy as np
import torch

sys.path.insert(0, str(common.ROOT / "src"))

MIDDLE = {"P": 1024, "C": 64, "G": 8, "hidden": 256}
AXES = {
    "P": (256, 512, 1024, 2048),
    "C": (16, 64, 256, 512),
    "G": (2, 4, 8, 16),
    "hidden": (128, 256, 512),
}
FAMILIES = ("qwen3_5", "qwen3_vl")
REPEATS = 3
PLAIN_TOKENS = 20_000
"""The plain forward is left out above so many tokens."""


def measure(cell: dict[str, Any]) -> dict[str, float | None]:
    """Seconds of both forms at one point."""
    import scoring

    torch.set_num_threads(1)
    model = scoring.build(cell["family"], checkpointing=False, hidden=cell["hidden"])
    group = scoring.contexts(model, cell["P"], cell["C"], cell["G"])
    forms = {"shared": scoring.shared}
    if cell["G"] * (cell["P"] + cell["C"]) <= PLAIN_TOKENS:
        forms["plain"] = scoring.plain
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number, (name, form) in itertools.product(range(cell["repeats"] + 1), forms.items()):
        taken = scoring.timed(model, lambda form=form: form(model, group))[0]
        if number:
            seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"shared s": medians["shared"], "plain s": medians.get("plain")}


def row(cell: dict[str, Any]) -> dict[str, Any]:
    """One point, measured in a process of its own.

    Raises:
        RuntimeError: The process failed.
    """
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{cell}: {result.stderr[-2000:]}")
    point = {name: cell[name] for name in ("family", "axis", *MIDDLE)}
    return point | json.loads(result.stdout.splitlines()[-1])


def slope(points: list[dict[str, Any]], axis: str, form: str) -> float | None:
    """The exponent of a form's time along an axis."""
    known = [(math.log(p[axis]), math.log(p[form])) for p in points if p[form]]
    if len(known) < 2:
        return None
    return float(np.polyfit(*zip(*known, strict=True), 1)[0])


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each family and axis."""
    lines = []
    for family, axis in itertools.product(FAMILIES, AXES):
        points = [r for r in rows if (r["family"], r["axis"]) == (family, axis)]
        if points:
            lines.append(
                {"family": family, "axis": axis}
                | {name: slope(points, axis, f"{name} s") for name in ("shared", "plain")}
            )
    return lines


def plot(rows: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    """All points in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(AXES), figsize=(13, 3.4), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        for family, colour in zip(FAMILIES, ("tab:blue", "tab:orange"), strict=True):
            points = [r for r in rows if (r["family"], r["axis"]) == (family, axis)]
            line = next(x for x in lines if (x["family"], x["axis"]) == (family, axis))
            for form, style in (("shared", "o-"), ("plain", "x--")):
                known = [p for p in points if p[f"{form} s"]]
                label = f"{family} {form}: {line[form]:.2f}" if line[form] is not None else None
                panel.plot(
                    [p[axis] for p in known],
                    [p[f"{form} s"] for p in known],
                    style,
                    color=colour,
                    alpha=1.0 if form == "shared" else 0.5,
                    label=label,
                )
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.set_xticks(AXES[axis], map(str, AXES[axis]))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, title="exponent", title_fontsize=7)
    panels[0].set_ylabel("seconds, forward + backward")
    figure.tight_layout()
    figure.savefig(common.RESULTS / "exponents.png", dpi=130)


def main() -> None:
    """Measures all points, or one given as JSON."""
    import argparse

    parser = common.arguments(__doc__ or "")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        # The parent reads the last line.
        sys.stdout.write(json.dumps(measure(json.loads(args.cell))) + "\n")
        return
    axes = {"G": (2, 8)} if args.quick else AXES
    cells = [
        MIDDLE
        | {"family": family, "axis": axis, axis: value}
        | {"repeats": 1 if args.quick else REPEATS}
        for family in FAMILIES
        for axis, values in axes.items()
        for value in values
    ]
    file = args.json or (None if args.quick else common.RESULTS / "exponents.json")
    rows = common.resumable(file, cells, row)
    lines = exponents(rows)
    summary = {f"{x['family']}_{x['axis']}": x["shared"] for x in lines}
    content = common.report(rows, summary)
    common.show(lines, "exponents")
    if file:
        common.write_json(file, content)
    if not args.quick:
        plot(rows, lines)
        text = (__doc__ or "") + "\n![](exponents.png)\n\n" + common.markdown(lines)
        common.write_markdown("exponents", "How the cost of scoring grows", text, content)


if __name__ == "__main__":
    main()
