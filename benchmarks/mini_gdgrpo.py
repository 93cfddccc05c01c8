"""GD-GRPO's claims on the embedded mini worlds, against outcome GRPO and without each of its parts.

One command makes all runs, several side by side. Stop it at any time and give it again: finished
runs are kept as rows in docs/results/mini_gdgrpo/rows/, to be committed, and runs in flight go on
from their checkpoints. All rows have one protocol: worlds, bases, settings (mini_rows.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import common
from experiment import Work, arguments, carry_out
from mini_gdgrpo_report import write_report
from mini_rows import Rows, Settings
from mini_runs import (
    ABLATIONS,
    FULL,
    OUTCOME,
    STRONG,
    Run,
    finish,
    frozen_base,
    other_modality,
)

BASES = (0, 1, 2)
QUICK_SEED = 100
"""Exploratory runs have seeds of their own."""


def grid() -> list[Run]:
    """All runs, in an order in which those that are done first say most by themselves."""
    return with_bases(
        [
            *(run for base in BASES for run in (*_pair("image", STRONG, base, 0), *_video(base))),
            *(Run("image", STRONG, method, base) for base in BASES for method in ABLATIONS),
            *(run for base in BASES for s in (0.5, 0.7) for run in _pair("image", s, base, 0)),
            *(
                run
                for base in BASES
                for s in (STRONG, 0.5, 0.7)
                for run in _pair("image", s, base, 1)
            ),
        ]
    )


def quick_grid() -> list[Run]:
    """One pair."""
    return with_bases(_pair("image", STRONG, 0, QUICK_SEED))


def with_bases(runs: Sequence[Run]) -> list[Run]:
    """The runs, each after the frozen bases that it is compared with."""
    all_runs = []
    for run in runs:
        bases = [frozen_base(run), *([other_modality(run)] if run.is_specialist else [])]
        all_runs += [*bases, run]
    return list(dict.fromkeys(all_runs))


def _pair(modality: str, shortcut: float, base: int, seed: int) -> list[Run]:
    return [Run(modality, shortcut, method, base, seed) for method in (FULL, OUTCOME)]


def _video(base: int) -> list[Run]:
    return _pair("video", STRONG, base, 0)


def main() -> None:
    """Makes the runs that are missing, and writes table, JSON and plot of what there is."""
    args = arguments(__doc__ or "").parse_args()
    runs, settings, folder = grid(), Settings(), common.RESULTS
    logs = common.ROOT / "logs" / "mini_gdgrpo"
    if args.quick:
        runs, settings = quick_grid(), Settings(steps=8, every=4, items=32, curve_items=16)
        folder = logs = logs.with_name("mini_gdgrpo_quick")
        shutil.rmtree(logs, ignore_errors=True)
    rows = Rows(folder / "mini_gdgrpo" / "rows")
    by_name = {run.name: run for run in runs}

    def begin() -> Work:
        rows.begin(settings)
        return lambda name, children: finish(by_name[name], settings, rows, logs, children)

    carry_out(args, list(by_name), rows, begin, lambda: write_report(runs, rows, folder, args.json))


if __name__ == "__main__":
    main()
