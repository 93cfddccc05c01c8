"""A run of the mini experiment: its settings, its training, its evaluation, its row."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from mini_rows import Rows, Settings
from side_by_side import Children

from reframe_vl.runs import CHECKPOINTS, POLICY, latest_checkpoint

FULL, OUTCOME, BASE = "gdgrpo", "grpo_outcome", "base"
EXPERIMENTS = {
    ("image", FULL): "gdgrpo_spatial",
    ("image", OUTCOME): "grpo_outcome",
    ("video", FULL): "gdgrpo_temporal",
    ("video", OUTCOME): "grpo_outcome_temporal",
}
ABLATIONS: dict[str, tuple[str, ...]] = {
    "no_grounding": ("reward.grounding=0",),
    "no_drop": ("drop=0.0",),
    "no_grounding_no_drop": ("reward.grounding=0", "drop=0.0"),
    "no_call_reward": ("reward.call=0",),
    "whole_group": ("algorithm.settings.subgroups=false",),
}
"""GD-GRPO without a part."""
STRONG = 0.9
"""The shortcut strength of videos, ablations and specialists."""

_writing = threading.Lock()


@dataclass(frozen=True)
class Run:
    """A training, or a frozen base.

    Attributes:
        modality: ``image`` or ``video``.
        shortcut: Its strength.
        method: A key of ``ABLATIONS``, ``gdgrpo``, ``grpo_outcome`` or ``base``.
        base: The shipped base checkpoint that it starts from.
        seed: Of training; 0 for a frozen base.
    """

    modality: str
    shortcut: float
    method: str
    base: int
    seed: int = 0

    @property
    def world(self) -> str:
        """Names what it is evaluated on."""
        return f"{self.modality}-{self.shortcut}"

    @property
    def name(self) -> str:
        """Names its row."""
        end = "" if self.method == BASE else f"-seed{self.seed}"
        return f"{self.world}-{self.method}-base{self.base}{end}"

    @property
    def experiment(self) -> str:
        """Its config in configs/experiment/."""
        method = OUTCOME if self.method in (OUTCOME, BASE) else FULL
        return EXPERIMENTS[self.modality, method]

    @property
    def is_specialist(self) -> bool:
        """Whether it is measured on the other modality too."""
        return self.method == FULL and self.shortcut == STRONG and self.seed == 0

    def overrides(self, settings: Settings) -> list[str]:
        """What decides its outcome."""
        return [
            f"experiment={self.experiment}",
            f"data.shortcut={self.shortcut}",
            f"data.evaluation_size={settings.items}",
            f"base={self.base}",
            f"seed={self.seed}",
            f"steps={settings.steps}",
            *ABLATIONS.get(self.method, ()),
        ]


def frozen_base(run: Run) -> Run:
    """The base that a run starts from, on what the run is evaluated on."""
    return Run(run.modality, run.shortcut, BASE, run.base)


def other_modality(run: Run) -> Run:
    """The frozen base of a run's base on the other modality."""
    return Run("image" if run.modality == "video" else "video", run.shortcut, BASE, run.base)


def finish(run: Run, settings: Settings, rows: Rows, logs: Path, children: Children) -> None:
    """Trains or goes on, evaluates, writes the row, and clears the run directory.

    Weights of specialists stay, as they can teach.

    Args:
        run: What to do.
        settings: Length and evaluation.
        rows: Where its row goes.
        logs: Run directories and outputs.
        children: Runs the processes.
    """
    fingerprint = rows.begin(settings)
    # A run of another protocol must never be gone on with.
    logs = logs / fingerprint
    folder, output = logs / run.experiment / run.name, logs / "output"
    log, out = output / f"{run.name}.log", output / f"{run.name}.result.json"
    trained = 0.0
    if run.method != BASE:
        trained = _train(run, settings, logs, log, children)
    spec = output / f"{run.name}.spec.json"
    common.write_json(spec, _evaluation(run, settings, folder))
    script = common.ROOT / "benchmarks" / "mini_evaluate.py"
    children.run([sys.executable, str(script), str(spec), str(out)], log)
    result = json.loads(out.read_text())
    with _writing:
        rows.begin(settings)
        rows.keep_items(run.world, result["items"])
        if result["cross"]:
            rows.keep_items(other_modality(run).world, result["cross"]["items"])
        rows.write(run.name, _row(run, settings, fingerprint, trained, result))
    if run.is_specialist:
        shutil.rmtree(logs / "specialists" / run.name, ignore_errors=True)
        shutil.copytree(folder / POLICY, logs / "specialists" / run.name)
    shutil.rmtree(folder, ignore_errors=True)
    for path in (log, out, spec):
        path.unlink()


def _train(run: Run, settings: Settings, logs: Path, log: Path, children: Children) -> float:
    """Seconds of training, those of earlier attempts included."""
    folder = logs / run.experiment / run.name
    times = folder / "seconds.txt"
    done = latest_checkpoint(folder) == _checkpoint(folder, settings.steps)
    if not done or not (folder / POLICY).is_dir():
        start = time.monotonic()
        try:
            children.run(_training(run, settings, logs), log)
        finally:
            folder.mkdir(parents=True, exist_ok=True)
            with times.open("a") as stream:
                stream.write(f"{time.monotonic() - start}\n")
    return sum(map(float, times.read_text().split()))


def _training(run: Run, settings: Settings, logs: Path) -> list[str]:
    return [
        sys.executable,
        str(common.ROOT / "src" / "train.py"),
        *run.overrides(settings),
        f"run_name={run.name}",
        f"paths.log_dir={logs}",
        "resume=auto",
        "num_threads=1",
        # It is evaluated afterwards, from its checkpoints, where each item's outcome is kept.
        "evaluate=false",
        "evaluation.every=0",
        f"callbacks.checkpoint.every={settings.every}",
        "callbacks.checkpoint.keep=null",
        "callbacks.rollout_log.save=false",
    ]


def _checkpoint(folder: Path, step: int) -> Path:
    """After so many steps."""
    return folder / CHECKPOINTS / f"step_{step - 1:06d}.ckpt"


def _evaluation(run: Run, settings: Settings, folder: Path) -> dict[str, Any]:
    trains = run.method != BASE
    steps = settings.curve_steps() if trains else []
    return {
        "overrides": run.overrides(settings),
        "final": str(_checkpoint(folder, settings.steps)) if trains else None,
        "curve": {step: str(_checkpoint(folder, step)) for step in steps},
        "curve_items": settings.curve_items,
        "cross": other_modality(run).overrides(settings) if run.is_specialist else None,
    }


def _row(
    run: Run, settings: Settings, fingerprint: str, trained: float, result: dict[str, Any]
) -> dict[str, Any]:
    return {
        **asdict(run),
        "overrides": run.overrides(settings),
        "fingerprint": fingerprint,
        "commit": common.commit(),
        "machine": common.machine(),
        "seconds": {
            "training": round(trained, 1),
            "evaluation": round(result["seconds"], 1),
        },
        "final": result["final"],
        "curve": result["curve"],
        "cross": result["cross"] and result["cross"]["final"],
    }
