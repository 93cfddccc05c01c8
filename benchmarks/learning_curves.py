"""Learning curves on the mini image world: GD-GRPO beside outcome GRPO, weak and strong shortcut.

Each run is an ordinary ``src/train.py`` with ``resume=auto``: stop this script at any time and
start it again; finished runs are read and unfinished ones go on.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXPERIMENTS = {"gdgrpo": "gdgrpo_spatial", "grpo_outcome": "grpo_outcome"}
COLORS = {"gdgrpo": "tab:blue", "grpo_outcome": "tab:orange"}
PANELS = (
    ("accuracy/tools", "accuracy with tools"),
    ("accuracy/conflict", "accuracy on the conflict set"),
    ("tool_gain", "tool gain"),
    ("grounding_iou", "IoU of calls with the evidence"),
)


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    shortcut: float
    seed: int
    steps: int
    logs: Path

    def overrides(self) -> list[str]:
        """Of its training."""
        return [
            f"experiment={EXPERIMENTS[self.method]}",
            f"data.shortcut={self.shortcut}",
            f"seed={self.seed}",
            f"steps={self.steps}",
            f"run_name=shortcut-{self.shortcut}-seed-{self.seed}-steps-{self.steps}",
            f"paths.log_dir={self.logs}",
            "num_threads=1",
            "callbacks.rollout_log.save=false",
            "resume=auto",
        ]

    @property
    def folder(self) -> Path:
        """Its run directory."""
        name = f"shortcut-{self.shortcut}-seed-{self.seed}-steps-{self.steps}"
        return self.logs / EXPERIMENTS[self.method] / name


def run(cell: Cell) -> None:
    """Trains, or goes on, or does nothing where the run is finished.

    Raises:
        RuntimeError: Training failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(common.ROOT / "src" / "train.py"), *cell.overrides()],
        cwd=common.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"{cell} failed:\n{result.stderr[-2000:]}")


def curve(cell: Cell) -> list[dict[str, float]]:
    """The run's learning curve."""
    lines = (cell.folder / "curve.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def row(cell: Cell) -> dict[str, Any]:
    """The run's final measures and its area under the curve."""
    results = json.loads((cell.folder / "results.json").read_text())
    accuracy = [point["accuracy/tools"] for point in curve(cell)]
    return {
        "method": cell.method,
        "shortcut": cell.shortcut,
        "seed": cell.seed,
        "base accuracy": results["base"]["accuracy"]["tools"]["value"],
        "accuracy": results["accuracy"]["tools"]["value"],
        "no tools": results["accuracy"]["no_tools"]["value"],
        "conflict": results["accuracy"]["conflict"]["value"],
        "tool gain": results["tool_gain"]["value"],
        "observation dependence": results["observation_dependence"]["value"],
        "IoU": results["grounding_iou"]["value"],
        "call rate": results["call_rate"]["value"],
        "area under accuracy": sum(accuracy) / len(accuracy),
    }


def plot(cells: list[Cell], path: Path) -> None:
    """A row of panels for each shortcut strength, a line for each run."""
    shortcuts = sorted({cell.shortcut for cell in cells})
    figure, axes = plt.subplots(
        len(shortcuts), len(PANELS), figsize=(15, 3.4 * len(shortcuts)), squeeze=False, sharex=True
    )
    for (line, shortcut), (column, (key, title)) in itertools.product(
        enumerate(shortcuts), enumerate(PANELS)
    ):
        axis = axes[line][column]
        for cell in (c for c in cells if c.shortcut == shortcut):
            points = curve(cell)
            label = f"{cell.method}, seed {cell.seed}"
            axis.plot(
                [p["step"] for p in points],
                [p[key] for p in points],
                color=COLORS[cell.method],
                linestyle="-" if cell.seed % 2 == 0 else "--",
                label=label,
            )
        axis.set_ylim(-0.05, 1.05)
        axis.grid(alpha=0.3)
        axis.set_title(f"{title} (shortcut {shortcut})", fontsize=10)
        axis.set_xlabel("step")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs the grid and writes table, JSON and plot."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--logs", type=Path, default=common.ROOT / "logs" / "learning_curves")
    args = parser.parse_args()
    steps = 20 if args.quick else args.steps
    seeds, shortcuts = ((0,), (0.9,)) if args.quick else ((0, 1), (0.5, 0.9))
    cells = [
        Cell(method, shortcut, seed, steps, args.logs)
        for seed in seeds
        for shortcut in shortcuts
        for method in EXPERIMENTS
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, cells))
    rows = [row(cell) for cell in cells]
    summary: dict[str, Any] = {}
    for shortcut, method in itertools.product(shortcuts, EXPERIMENTS):
        chosen = [r for r in rows if (r["shortcut"], r["method"]) == (shortcut, method)]
        means = {
            name: sum(r[name] for r in chosen) / len(chosen)
            for name in ("accuracy", "conflict", "tool gain", "observation dependence")
        }
        summary.setdefault(str(shortcut), {})[method] = means
    content = common.report(rows, summary)
    common.show(rows, "mini image world, greedy, 256 items")
    folder = args.logs if args.quick else common.RESULTS
    plot(cells, folder / "learning_curves.png")
    common.write_json(args.json or folder / "learning_curves.json", content)
    if not args.quick:
        text = (
            "# Learning curves: GD-GRPO beside outcome GRPO\n\n"
            f"`{content['command']}` at {content['commit']} on {content['machine']}.\n"
            "Mini image world, base 0, greedy decoding on 256 test items (curves: 128); two "
            "seeds, so no intervals are claimed here.\n\n"
            f"{common.markdown(rows)}\n\n![curves](learning_curves.png)\n"
        )
        (folder / "learning_curves.md").write_text(text)


if __name__ == "__main__":
    main()
