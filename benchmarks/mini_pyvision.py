"""PyVision-RL on the mini worlds: which part keeps a policy from giving up its tool?

Images: the whole recipe, the recipe without the accumulative tool reward, without ranking by the
deviation of rewards, with advantages divided by the standard deviation, and without all three.
Videos: on demand against the whole video in context. Each policy starts from a shipped base that
has learned to write code from scripted rollouts (python_lessons.py); code runs as mini_python.py
says.
Stop it at any time and give it again: finished runs are kept as rows in
docs/results/mini_pyvision/rows/, to be committed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from experiment import Work, arguments, carry_out
from method_runs import (
    Laboratory,
    Measure,
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
from python_lessons import CONTEXT, FULL_CONTEXT
from side_by_side import Children

NAME = "mini_pyvision"
REPLICATES = ((0, 0), (1, 1), (2, 2))
"""Bases, each with a seed of its own."""
QUICK_SEED = 100
FULL, PLAIN = "full", "none_of_them"
PARTS: dict[str, tuple[str, ...]] = {
    FULL: (),
    "no_tool_reward": ("reward.tool_use=0",),
    "no_ranking": ("algorithm.settings.selection.rank=false",),
    "std_normalised": ("algorithm.settings.scale=std",),
    PLAIN: (
        "reward.tool_use=0",
        "algorithm.settings.selection.rank=false",
        "algorithm.settings.scale=std",
    ),
}
"""On images: the recipe, and the recipe without a part."""
DEMAND, SHOWN = "video", "video_full"
"""On videos: the whole recipe on demand; and the same with all frames in context, without tools."""
METHODS = (*PARTS, DEMAND, SHOWN)
TAGS = ("rollouts/calls", "rollouts/turns", "rollouts/reward/answer", "rollouts/parse_rate")
FILES = (
    *PROTOCOL_FILES,
    "configs/experiment/pyvision_*.yaml",
    "configs/experiment/sft.yaml",
    "configs/algorithm/pyvision.yaml",
    "configs/algorithm/sft.yaml",
    "configs/reward/pyvision.yaml",
    "configs/numbers/pyvision_mini.yaml",
    "configs/rollout/episodes.yaml",
    "configs/rollout/hf.yaml",
    "configs/rollout/python.yaml",
    "benchmarks/mini_python.py",
    "benchmarks/python_lessons.py",
)
TEXT = """
Tool calls are executed calls of a sampled rollout in training; a rollout may make four. *Change* is
the mean of the last 10 steps less that of the first 10: a part prevents a collapse if calls fall
without it and not with it. Visual tokens are those of a greedy rollout on a test video. Intervals
are 95% bootstrap intervals over three bases with a seed each: three are few, so they may be too
narrow.

All numbers are ours. The cold start is imitation of scripts, most of which call the tool once or
twice; how much a policy calls in its first step is put in by us, and is no finding. The picture in
the tool's runtime is the whole one at full detail, with the cue along its border.
"""


@dataclass(frozen=True)
class Settings:
    """How long runs are and how they are evaluated.

    Attributes:
        lessons: Scripted rollouts of each kind.
        cold: Steps of supervised fine-tuning, of 64 rollouts each.
        steps: Of reinforcement learning.
        items: Of the final evaluation.
    """

    lessons: int = 4800
    cold: int = 300
    steps: int = 60
    items: int = 256


def kind_of(method: str) -> str:
    """What its lessons are about."""
    return method if method in (DEMAND, SHOWN) else "image"


def context_of(kind: str) -> list[str]:
    """How its episodes go."""
    tools = [f"{{_target_:mini_python.MiniPython,modality:{m}}}" for m in ("image", "video")]
    shown = [*FULL_CONTEXT] if kind == SHOWN else []
    return [*CONTEXT, *shown, f"rollout.tools=[{','.join(tools)}]"]


def finish(run: Run, laboratory: Laboratory, children: Children) -> None:
    """Makes a run and its row."""
    settings: Settings = laboratory.settings
    kind = kind_of(run.method)
    start = _cold(kind, run.base, laboratory, children)
    words = [
        f"experiment=pyvision_{kind.partition('_')[0]}",
        f"model.path={start}",
        f"seed={run.seed}",
        f"steps={settings.steps}",
        f"data.evaluation_size={settings.items}",
        "evaluation.arms=[tools,no_tools]",
        "evaluation.base=false",
        "evaluation.every=0",
        *context_of(kind),
        *PARTS.get(run.method, ()),
    ]
    folder, seconds = timed(lambda: laboratory.train(run.name, words, children))
    laboratory.write(run, folder, seconds, TAGS)


def _cold(kind: str, base: int, laboratory: Laboratory, children: Children) -> Path:
    """The policy that has learned from scripts."""
    settings: Settings = laboratory.settings
    lessons = laboratory.logs / f"lessons-{kind}"
    script = common.ROOT / "benchmarks" / "python_lessons.py"
    laboratory.once(lessons, [str(script), kind, str(lessons), str(settings.lessons)], children)
    words = [
        "experiment=sft",
        "rollout=python",
        "numbers=pyvision_mini",
        f"data=mini_{kind.partition('_')[0]}",
        f"rollouts=[{lessons}]",
        f"base={base}",
        f"steps={settings.cold}",
        # Eyes that see already must not forget how. All tokens weigh alike: were it all rollouts,
        # a first token that answers would outweigh one that calls, and the tool would be given up.
        "+model.freeze_vision=true",
        "lr=1.5e-3",
        f"prompts_per_step={min(64, settings.lessons)}",
        "evaluate=false",
        "evaluation.every=0",
        *context_of(kind),
    ]
    return laboratory.policy(f"cold-{kind}-base{base}", words, children)


def write_report(runs: list[Run], rows: Rows, folder: Path, args: Any) -> None:
    """Writes page and JSON, and prints the tables."""
    table = Table(runs, rows)

    def change(tag: str) -> Measure:
        return lambda row: at_end(tag)(row) - at_start(tag)(row)

    calls = "rollouts/calls"
    measures: dict[str, Measure] = {
        "calls, first steps": at_start(calls),
        "calls, last steps": at_end(calls),
        "calls, change": change(calls),
        "valid calls, first steps": at_start("rollouts/parse_rate"),
        "right, first steps": at_start("rollouts/reward/answer"),
        "accuracy": result("accuracy", "tools"),
        "accuracy without tools": result("accuracy", "no_tools"),
        "calls, greedy": result("calls_per_answer"),
        "visual tokens": result("visual_tokens", "tools"),
    }
    levels = {m: {n: table.level(m, f) for n, f in measures.items()} for m in METHODS}
    differences = {
        f"{FULL} - {other}": {n: table.difference(FULL, other, f) for n, f in measures.items()}
        for other in PARTS
        if other != FULL
    }
    differences[f"{DEMAND} - {SHOWN}"] = {
        n: table.difference(DEMAND, SHOWN, f) for n, f in measures.items()
    }
    tokens = {m: levels[m]["visual tokens"] for m in (DEMAND, SHOWN)}
    on_demand, shown_whole = (tokens[m]["value"] if tokens[m] else None for m in (DEMAND, SHOWN))
    ratio = on_demand / shown_whole if on_demand is not None and shown_whole else None
    summary = {
        **levels,
        "differences": differences,
        "visual_tokens_ratio": ratio,
        "missing": table.missing,
    }
    shown = [{"run": run.name, "seconds": row["seconds"]} for run, row in table.rows.items()]
    content = common.report(shown, summary)
    tables = {
        "Tool calls and measures": cells(levels, list(measures)),
        "Differences": cells(differences, list(measures)),
        "Visual tokens of a video": [
            {"on demand": on_demand, "whole video": shown_whole, "ratio": ratio}
        ],
    }
    publish(NAME, "PyVision-RL on the mini worlds", TEXT, folder, rows, content, tables, args.json)


def main() -> None:
    """Makes the runs that are missing, and writes the report of what there is."""
    args = arguments(__doc__ or "").parse_args()
    settings, folder, logs = Settings(), common.RESULTS, common.ROOT / "logs" / NAME
    runs = [Run(method, base, seed) for base, seed in REPLICATES for method in METHODS]
    if args.quick:
        settings = Settings(lessons=128, cold=2, steps=2, items=8)
        runs = [Run(method, 0, QUICK_SEED) for method in (FULL, DEMAND)]
        folder = logs = logs.with_name(f"{NAME}_quick")
        shutil.rmtree(logs, ignore_errors=True)
    rows = Rows(folder / NAME / "rows", FILES)
    by_name = {run.name: run for run in runs}
    # Children find the tool that their configs name.
    places = [str(common.ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))

    def begin() -> Work:
        laboratory = Laboratory(settings, rows, logs)
        return lambda name, children: finish(by_name[name], laboratory, children)

    carry_out(args, list(by_name), rows, begin, lambda: write_report(runs, rows, folder, args))


if __name__ == "__main__":
    main()
