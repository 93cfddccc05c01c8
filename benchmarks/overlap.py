"""How long a step takes with rollouts by vLLM, and with the next step's made while this one trains.

    .venv-vllm/bin/python benchmarks/overlap.py [--quick] [--json FILE]

The default experiment on the mini image world, with `rollout=hf`, with `rollout=vllm`, and with
`rollout=vllm rollout.overlap=true`: short runs of each in turn, all from the first shipped base and
with the same seed in a round. *Seconds a step* is the median over a run's steps, the first ones
left out: an engine warms up in them. Ratios are those of a round's runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, arguments, conclude, report, show
from method_runs import series
from mini_vllm import HF, METHODS, OVERLAP, VLLM
from side_by_side import Children

WARM_UP = 5
STEP = "time/step_s"


def seconds_a_step(method: str, seed: int, steps: int, folder: Path, children: Children) -> float:
    """The median of a short run's steps."""
    name = f"{method}-{seed}"
    words = [
        "experiment=gdgrpo_spatial",
        "base=0",
        f"seed={seed}",
        f"steps={steps}",
        "evaluate=false",
        "evaluation.every=0",
        f"run_name={name}",
        f"paths.log_dir={folder}",
        *METHODS[method],
    ]
    script = str(ROOT / "src" / "train.py")
    children.run([sys.executable, script, *words], folder / f"{name}.log")
    board = folder / "gdgrpo_spatial" / name / "tensorboard"
    return statistics.median(series(board, [STEP])[STEP][WARM_UP:])


def main() -> None:
    """Measures in turn, prints and writes the tables."""
    args = arguments(__doc__ or "").parse_args()
    rounds, steps = (1, WARM_UP + 3) if args.quick else (3, WARM_UP + 25)
    rows: list[dict[str, Any]] = []
    children = Children()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rounds):
            row: dict[str, Any] = {"round": seed}
            for method in METHODS:
                row[method] = seconds_a_step(method, seed, steps, Path(folder), children)
            rows.append(row)
            show([row], "Seconds a step")
    summary = {
        f"{first} / {second}": statistics.median(row[first] / row[second] for row in rows)
        for first, second in ((OVERLAP, VLLM), (VLLM, HF), (OVERLAP, HF))
    }
    content = report(rows, summary)
    show([summary], "Medians of the ratios")
    conclude(args, "Rollouts while training", __doc__ or "", content)


if __name__ == "__main__":
    main()
