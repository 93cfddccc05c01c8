"""The default experiment with rollouts by vLLM: is it as good, and what does overlap change?

    .venv-vllm/bin/python benchmarks/mini_vllm.py [--quick] [--jobs N]

GD-GRPO on the mini image world, three seeds, with the rollouts of `rollout=hf`, of `rollout=vllm`,
and of `rollout=vllm rollout.overlap=true`, whose rollouts are one step behind the weights. Stop it
at any time and give it again: finished runs are kept as rows in docs/results/mini_vllm/rows/.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import common
from experiment import Work, arguments, carry_out
from method_runs import Laboratory, Measure, Row, Run, Table, cells, publish, result, timed
from mini_rows import PROTOCOL_FILES, Rows
from side_by_side import Children

NAME = "mini_vllm"
BASE, SEEDS = 0, (0, 1, 2)
HF, VLLM, OVERLAP = "hf", "vllm", "vllm_overlap"
METHODS: dict[str, tuple[str, ...]] = {
    HF: (),
    VLLM: ("rollout=vllm",),
    OVERLAP: ("rollout=vllm", "rollout.overlap=true"),
}
TAGS = ("time/step_s", "rollouts/lag", "weights/probe_gap", "train/sampler_gap_max")
QUICK_SEED = 100
FILES = (*PROTOCOL_FILES, "configs/rollout/vllm.yaml")
TEXT = """
Each run starts from the first of the three shipped bases. Accuracy is greedy, with tools, on 256
items; its learning curve has a point every 40 steps on 128 of them, and *area* is the area under it
over the run's length. Intervals are 95% bootstrap intervals over seeds; differences are paired. How
long steps take is measured apart, in [overlap](overlap.md): these runs had other work beside them.
"""


@dataclass(frozen=True)
class Settings:
    """How long runs are and how they are evaluated.

    Attributes:
        steps: Of training.
        every: Steps between points of the learning curve.
        items: Of the final evaluation.
        curve_items: Of the learning curve.
    """

    steps: int = 240
    every: int = 40
    items: int = 256
    curve_items: int = 128

    def overrides(self) -> list[str]:
        """Training, data and evaluation."""
        return [
            "experiment=gdgrpo_spatial",
            f"base={BASE}",
            f"steps={self.steps}",
            f"data.evaluation_size={self.items}",
            f"evaluation.every={self.every}",
            f"evaluation.items={self.curve_items}",
            "evaluation.curve_arms=[tools]",
            "evaluation.arms=[tools,no_tools]",
            "evaluation.base=false",
        ]


def finish(run: Run, laboratory: Laboratory, children: Children) -> None:
    """Makes a run and its row."""
    settings: Settings = laboratory.settings
    words = [*settings.overrides(), f"seed={run.seed}", *METHODS[run.method]]
    folder, seconds = timed(lambda: laboratory.train(run.name, words, children))
    laboratory.write(run, folder, seconds, TAGS)


def area(row: Row) -> float:
    """Under the learning curve, as a mean accuracy."""
    points = sorted((p["step"], p["accuracy/tools"]) for p in row["curve"])
    pieces = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)]
    return sum(pieces) / max(points[-1][0] - points[0][0], 1)


def largest_of(tag: str) -> Measure:
    """A logged number's maximum over the steps."""
    return lambda row: max(row["series"].get(tag) or [float("nan")])


MEASURES: dict[str, Measure] = {
    "accuracy": result("accuracy", "tools"),
    "area": area,
    "lag": largest_of("rollouts/lag"),
    "largest_probe_gap": largest_of("weights/probe_gap"),
}


def write_report(runs: list[Run], rows: Rows, folder: Any, args: Any) -> None:
    """Writes page and JSON, and prints the tables."""
    table = Table(runs, rows)
    levels = {m: {n: table.level(m, f) for n, f in MEASURES.items()} for m in METHODS}
    differences = {
        f"{first} - {second}": {n: table.difference(first, second, f) for n, f in MEASURES.items()}
        for first, second in ((VLLM, HF), (OVERLAP, VLLM), (OVERLAP, HF))
    }
    each = [
        {"run": run.name, **{name: measure(row) for name, measure in MEASURES.items()}}
        for run, row in table.rows.items()
    ]
    summary = {**levels, "differences": differences, "missing": table.missing}
    content = common.report(each, summary)
    tables = {
        "Measures": cells(levels, list(MEASURES)),
        "Differences": cells(differences, list(MEASURES)),
        "Runs": each,
    }
    publish(
        NAME,
        "The mini experiment with rollouts by vLLM",
        TEXT,
        folder,
        rows,
        content,
        tables,
        args.json,
    )


def main() -> None:
    """Makes the runs that are missing, and writes the report of what there is."""
    args = arguments(__doc__ or "").parse_args()
    settings, folder, logs = Settings(), common.RESULTS, common.ROOT / "logs" / NAME
    runs = [Run(method, BASE, seed) for seed in SEEDS for method in METHODS]
    if args.quick:
        settings = Settings(steps=3, every=2, items=8, curve_items=8)
        runs = [Run(method, BASE, QUICK_SEED) for method in METHODS]
        folder = logs = logs.with_name(f"{NAME}_quick")
        shutil.rmtree(logs, ignore_errors=True)
    rows = Rows(folder / NAME / "rows", FILES)
    by_name = {run.name: run for run in runs}

    def begin() -> Work:
        laboratory = Laboratory(settings, rows, logs)
        return lambda name, children: finish(by_name[name], laboratory, children)

    carry_out(args, list(by_name), rows, begin, lambda: write_report(runs, rows, folder, args))


if __name__ == "__main__":
    main()
