"""Two specialists become one student, on the embedded mini worlds: OG-MOPD and its baselines.

One command makes all runs, several side by side: specialists, merges of them, Mix-RL at two
budgets, MOPD, MOPD with canonical calls but without repair, OG-MOPD, and both distillations again
from teachers trained on the outcome alone. Stop it at any time and give it again: finished runs are
kept as rows in docs/results/mini_reframe/rows/, to be committed, and runs in flight go on from
their checkpoints. All rows have one protocol.
"""

from __future__ import annotations

import shutil

import common
from experiment import Work, arguments, carry_out
from mini_rows import Rows
from reframe_report import write_report
from reframe_runs import BASE, FILES, METHODS, Laboratory, Run, Settings

BASES, SEEDS = (0, 1, 2), (0, 1)
QUICK_SEED = 100
"""Exploratory runs have seeds of their own."""


def grid() -> list[Run]:
    """All runs, in an order in which those that are done first say most by themselves."""
    return [
        Run(method, base, 0 if method == BASE else seed)
        for seed in SEEDS
        for base in BASES
        for method in METHODS
        if method != BASE or seed == SEEDS[0]
    ]


def quick_grid() -> list[Run]:
    """A few methods from one base."""
    methods = ("gd_spatial", "gd_temporal", "merge_ties", "ogmopd")
    return [Run(BASE, 0), *(Run(method, 0, QUICK_SEED) for method in methods)]


def main() -> None:
    """Makes the runs that are missing, and writes table, JSON and plot of what there is."""
    args = arguments(__doc__ or "").parse_args()
    runs, settings, folder = grid(), Settings(), common.RESULTS
    logs = common.ROOT / "logs" / "mini_reframe"
    if args.quick:
        runs, settings = quick_grid(), Settings(4, 4, 2, 2, 16, 8)
        folder = logs = logs.with_name("mini_reframe_quick")
        shutil.rmtree(logs, ignore_errors=True)
    rows = Rows(folder / "mini_reframe" / "rows", FILES)
    by_name = {run.name: run for run in runs}

    def begin() -> Work:
        laboratory = Laboratory(settings, rows, logs)
        return lambda name, children: laboratory.finish(by_name[name], children)

    carry_out(args, list(by_name), rows, begin, lambda: write_report(runs, rows, folder, args.json))


if __name__ == "__main__":
    main()
