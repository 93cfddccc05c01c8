"""Vision-EKIPL on the mini image world: does a good auxiliary model speed up and widen learning?

GRPO alone, on 8 rollouts; EKIPL on the best 12, and on the best 8, of 8 of its own and 8 of one
auxiliary, a GD-GRPO specialist of another base; and GRPO on the best 12 of 16 of its own, which
costs what EKIPL costs. Rewards, KL penalty and learning rate are the same. Stop it at any time and
give it again: finished runs are kept as rows in docs/results/mini_ekipl/rows/, to be committed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from experiment import Work, arguments, carry_out
from method_runs import (
    Laboratory,
    Measure,
    Row,
    Run,
    Table,
    at_end,
    at_start,
    cells,
    publish,
    result,
    timed,
)
from mini_rows import PROTOCOL_FILES, Rows
from side_by_side import Children

from reframe_vl.mini.model import NUM_BASES, base_folder
from reframe_vl.runs import POLICY

NAME = "mini_ekipl"
BASES, SEEDS = (0, 1, 2), (0, 1)
BASE, AUXILIARY = "base", "auxiliary"
GRPO, BEST, EKIPL, EKIPL_8 = "grpo", "grpo_best", "ekipl", "ekipl_8"
ALONE = "callbacks.auxiliary=null"
TRAINED: dict[str, tuple[str, ...]] = {
    GRPO: (ALONE, "kept_rollouts=8"),
    EKIPL: (),
    BEST: (ALONE, "rollouts_per_prompt=16"),
    EKIPL_8: ("kept_rollouts=8",),
}
"""Methods by what sets them apart."""
SHORTCUT = 0.5
GOAL = 0.8
AUXILIARY_SEED = 100
TAGS = ("selection/own_share", "selection/own_share_above", "selection/zero_variance")
FILES = (
    *PROTOCOL_FILES,
    "configs/experiment/vision_ekipl.yaml",
    "configs/algorithm/ekipl.yaml",
    "configs/reward/ekipl.yaml",
    "configs/numbers/ekipl_mini.yaml",
)
TEXT = f"""
Each run starts from one of the three shipped bases, on images at shortcut strength {SHORTCUT}.
The auxiliary of a base is a GD-GRPO specialist of the next base: it knows more, and it is another
model. Accuracy is greedy, with tools; pass@k is unbiased, of sampled answers at temperature 1.
*Steps to {GOAL}* is the first evaluation at which the accuracy is that high; a run that never gets
there counts with all its steps. Intervals are 95% bootstrap intervals over bases and seeds,
differences are paired. Three bases are few, so intervals may be too narrow.
"""


@dataclass(frozen=True)
class Settings:
    """How long runs are and how they are evaluated.

    Attributes:
        steps: Of each method.
        every: Steps between points of the learning curve.
        auxiliary: Steps of an auxiliary's own training.
        items: Of the final evaluation, and of pass@k.
        curve_items: Of the learning curve.
        samples: Of each item, for pass@k.
    """

    steps: int = 160
    every: int = 10
    auxiliary: int = 240
    items: int = 256
    curve_items: int = 128
    samples: int = 32

    @property
    def ks(self) -> list[int]:
        """k of pass@k."""
        return [2**n for n in range(self.samples.bit_length())]

    def overrides(self, base: int) -> list[str]:
        """Data and evaluation."""
        return [
            f"data.shortcut={SHORTCUT}",
            f"data.evaluation_size={self.items}",
            f"base={base}",
            "evaluation.arms=[tools,no_tools]",
            "evaluation.base=false",
            f"evaluation.pass_at_k.samples={self.samples}",
            f"evaluation.pass_at_k.items={self.items}",
        ]


def finish(run: Run, laboratory: Laboratory, children: Children) -> None:
    """Makes a run and its row."""
    settings: Settings = laboratory.settings
    common_part = settings.overrides(run.base)
    if run.method == BASE:
        words = [f"ckpt={base_folder(run.base)}", *common_part]
        folder, seconds = timed(lambda: laboratory.evaluate(run.name, words, children))
    elif run.method == AUXILIARY:
        words = [f"ckpt={_auxiliary(run.base, laboratory, children)}", *common_part]
        folder, seconds = timed(lambda: laboratory.evaluate(run.name, words, children))
    else:
        words = ["experiment=vision_ekipl", *common_part, f"seed={run.seed}"]
        words += [
            f"steps={settings.steps}",
            f"evaluation.every={settings.every}",
            f"evaluation.items={settings.curve_items}",
            "evaluation.curve_arms=[tools]",
            *TRAINED[run.method],
        ]
        if ALONE not in TRAINED[run.method]:
            good = _auxiliary((run.base + 1) % NUM_BASES, laboratory, children)
            words.append(f"auxiliaries={{good:{{checkpoint:{good}}}}}")
        folder, seconds = timed(lambda: laboratory.train(run.name, words, children))
    laboratory.write(run, folder, seconds, TAGS)


def _auxiliary(base: int, laboratory: Laboratory, children: Children) -> Path:
    settings: Settings = laboratory.settings
    words = [
        "experiment=gdgrpo_spatial",
        f"data.shortcut={SHORTCUT}",
        f"base={base}",
        f"seed={AUXILIARY_SEED}",
        f"steps={settings.auxiliary}",
        "evaluate=false",
        "evaluation.every=0",
    ]
    folder = laboratory.policy(f"auxiliary-of-base{base}", words, children)
    assert folder.name == POLICY
    return folder


def steps_to(goal: float, steps: int) -> Measure:
    """The first step of the learning curve at which the accuracy is that high, or all steps."""

    def read(row: Row) -> float:
        reached = [p["step"] for p in row["curve"] if p["accuracy/tools"] >= goal]
        return float(min(reached, default=steps))

    return read


def write_report(runs: list[Run], rows: Rows, settings: Settings, folder: Path, args: Any) -> None:
    """Writes page and JSON, and prints the tables."""
    table = Table(runs, rows)
    to_goal = f"steps_to_{GOAL}"
    measures: dict[str, Measure] = {
        "accuracy": result("accuracy", "tools"),
        to_goal: steps_to(GOAL, settings.steps),
    }
    measures |= {f"pass@{k}": result("pass_at_k", str(k)) for k in settings.ks}
    methods = (BASE, AUXILIARY, *TRAINED)
    levels = {
        method: {
            name: table.level(method, measure)
            for name, measure in measures.items()
            if name != to_goal or method in TRAINED
        }
        for method in methods
    }
    pairs = ((EKIPL, GRPO), (EKIPL, BEST), (EKIPL, EKIPL_8), (EKIPL, BASE), (GRPO, BASE))
    differences = {
        f"{first} - {second}": {
            name: table.difference(first, second, measure)
            for name, measure in measures.items()
            if name != to_goal or BASE not in (first, second)
        }
        for first, second in pairs
    }
    own = {
        f"{method} {tag}": {
            "first_steps": table.level(method, at_start(tag)),
            "last_steps": table.level(method, at_end(tag)),
            "rise": table.level(method, lambda row, t=tag: at_end(t)(row) - at_start(t)(row)),
        }
        for method in (EKIPL, EKIPL_8)
        for tag in TAGS
    }
    summary = {**levels, "differences": differences, "own": own, "missing": table.missing}
    shown = [{"run": run.name, "seconds": row["seconds"]} for run, row in table.rows.items()]
    content = common.report(shown, summary)
    tables = {
        "Measures at the end": cells(levels, list(measures)),
        "Differences": cells(differences, list(measures)),
        "What was kept of the pools, over training": cells(
            own, ["first_steps", "last_steps", "rise"]
        ),
    }
    publish(
        NAME, "Vision-EKIPL on the mini image world", TEXT, folder, rows, content, tables, args.json
    )


def main() -> None:
    """Makes the runs that are missing, and writes the report of what there is."""
    args = arguments(__doc__ or "").parse_args()
    settings, folder, logs = Settings(), common.RESULTS, common.ROOT / "logs" / NAME
    runs = [Run(method, base) for method in (BASE, AUXILIARY) for base in BASES]
    runs += [Run(m, base, seed) for seed in SEEDS for base in BASES for m in TRAINED]
    if args.quick:
        settings = Settings(steps=3, every=1, auxiliary=2, items=8, curve_items=8, samples=2)
        runs = [Run(BASE, 0), Run(GRPO, 0, AUXILIARY_SEED), Run(EKIPL, 0, AUXILIARY_SEED)]
        folder = logs = logs.with_name(f"{NAME}_quick")
        shutil.rmtree(logs, ignore_errors=True)
    rows = Rows(folder / NAME / "rows", FILES)
    by_name = {run.name: run for run in runs}

    def begin() -> Work:
        laboratory = Laboratory(settings, rows, logs)
        return lambda name, children: finish(by_name[name], laboratory, children)

    def report() -> None:
        write_report(runs, rows, settings, folder, args)

    carry_out(args, list(by_name), rows, begin, report)


if __name__ == "__main__":
    main()
