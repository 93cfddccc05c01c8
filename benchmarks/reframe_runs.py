"""A run of the distillation experiment: its settings, training or merging, evaluation, row."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from mini_rows import PROTOCOL_FILES, Rows
from side_by_side import Children

from reframe_vl.runs import CHECKPOINTS, POLICY

SHORTCUT = 0.9
MODALITIES = ("image", "video")
BASE = "base"
TEACHERS = {
    "gd_spatial": "gdgrpo_spatial",
    "gd_temporal": "gdgrpo_temporal",
    "outcome_spatial": "grpo_outcome",
    "outcome_temporal": "grpo_outcome_temporal",
}
"""Specialists and their experiments."""
PAIRS = {
    "specialists": ("gd_spatial", "gd_temporal"),
    "outcome_specialists": ("outcome_spatial", "outcome_temporal"),
}
DISTILLED = {
    "mopd": ("mopd", "specialists"),
    "mopd_nll": ("mopd_nll", "specialists"),
    "ogmopd": ("ogmopd", "specialists"),
    "mopd_outcome": ("mopd", "outcome_specialists"),
    "ogmopd_outcome": ("ogmopd", "outcome_specialists"),
}
"""Students, with their experiments and their teachers."""
MERGES = {
    "merge_linear": ("method=linear",),
    "merge_task_arithmetic": ("method=task_arithmetic", "weights=[1.0,1.0]"),
    "merge_ties": ("method=ties", "weights=[1.0,1.0]"),
    "merge_dare": ("method=dare_ties", "weights=[1.0,1.0]"),
}
MIX, MIX_LONG = "mix_rl", "mix_rl_long"
METHODS = (BASE, *TEACHERS, *MERGES, MIX, *DISTILLED, MIX_LONG)

FILES = (
    *PROTOCOL_FILES,
    "configs/data/mini_mixed.yaml",
    "configs/algorithm/ogmopd.yaml",
    "configs/callbacks/gate/*.yaml",
    "configs/experiment/mix_rl.yaml",
    "configs/experiment/*mopd*.yaml",
    "configs/merge.yaml",
)

_writing = threading.Lock()
_weights: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


@dataclass(frozen=True)
class Settings:
    """How long runs are and how they are evaluated.

    Attributes:
        specialist: Steps of a specialist.
        distillation: Steps of a distillation, and of Mix-RL at its budget.
        every: Steps between points of the learning curve.
        long_every: The same of the long Mix-RL.
        items: Of the final evaluation, of each modality.
        curve_items: The first so many of them are used for the curve.
    """

    specialist: int = 240
    distillation: int = 120
    every: int = 30
    long_every: int = 120
    items: int = 256
    curve_items: int = 128

    def steps(self, method: str) -> int:
        """Of training; a merge and a frozen base have none."""
        if method in TEACHERS:
            return self.specialist
        if method == MIX_LONG:
            # What both specialists and the distillation take together.
            return 2 * self.specialist + self.distillation
        return self.distillation if method in (MIX, *DISTILLED) else 0

    def curve(self, method: str) -> list[int]:
        """Points between the start, which is the base, and the end."""
        if method in TEACHERS:
            return []
        every = self.long_every if method == MIX_LONG else self.every
        return list(range(every, self.steps(method), every))


@dataclass(frozen=True)
class Run:
    """A training, a merge or a frozen base.

    Attributes:
        method: One of ``METHODS``.
        base: The shipped base checkpoint that it starts from.
        seed: Of training; 0 for a frozen base.
    """

    method: str
    base: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Names its row."""
        return f"{self.method}-base{self.base}" + (
            "" if self.method == BASE else f"-seed{self.seed}"
        )

    def teachers(self) -> list[Run]:
        """The specialists that it needs: spatial, then temporal."""
        if self.method in MERGES:
            pair = PAIRS["specialists"]
        elif self.method in DISTILLED:
            pair = PAIRS[DISTILLED[self.method][1]]
        else:
            return []
        return [Run(name, self.base, self.seed) for name in pair]

    def overrides(self, settings: Settings) -> list[str]:
        """What decides its training, apart from its teachers' weights."""
        experiment = {MIX: "mix_rl", MIX_LONG: "mix_rl", **TEACHERS}.get(self.method)
        experiment = experiment or DISTILLED[self.method][0]
        return [
            f"experiment={experiment}",
            f"data.shortcut={SHORTCUT}",
            f"base={self.base}",
            f"seed={self.seed}",
            f"steps={settings.steps(self.method)}",
        ]


class Laboratory:
    """Makes runs.

    Args:
        settings: Length and evaluation.
        rows: Where rows go.
        logs: Run directories, weights and outputs.
    """

    def __init__(self, settings: Settings, rows: Rows, logs: Path) -> None:
        self.settings, self.rows = settings, rows
        # A run of another protocol must never be gone on with.
        self.logs = logs / rows.begin(settings)

    def finish(self, run: Run, children: Children) -> None:
        """Trains or merges, evaluates on both modalities, and writes the row."""
        weights, seconds = self._weights(run, children)
        found: dict[str, Any] = {}
        for modality in MODALITIES:
            found[modality] = self._evaluate(run, weights, modality, children)
        row = {
            **asdict(run),
            "overrides": [] if not self.settings.steps(run.method) else self._overrides(run),
            "steps": self.settings.steps(run.method),
            "fingerprint": self.logs.name,
            "commit": common.commit(),
            "machine": common.machine(),
            "seconds": round(seconds, 1),
            **{m: {part: found[m][part] for part in ("final", "curve")} for m in MODALITIES},
        }
        with _writing:
            self.rows.begin(self.settings)
            for modality in MODALITIES:
                self.rows.keep_items(f"{modality}-{SHORTCUT}", found[modality]["items"])
            self.rows.write(run.name, row)
        if run.method not in TEACHERS:
            shutil.rmtree(self._folder(run), ignore_errors=True)

    def _folder(self, run: Run) -> Path:
        experiment = next(o for o in self._overrides(run) if o.startswith("experiment="))
        return self.logs / experiment.partition("=")[2] / run.name

    def _overrides(self, run: Run) -> list[str]:
        if run.method in MERGES or run.method == BASE:
            return [f"experiment={run.method}"]
        return run.overrides(self.settings)

    def _weights(self, run: Run, children: Children) -> tuple[Path | None, float]:
        """The folder of a run's final weights, made if it is missing, and the seconds it took."""
        if run.method == BASE:
            return None, 0.0
        folder = self._folder(run)
        # A teacher is made once, whoever needs it first.
        with _writing:
            lock = _weights[folder]
        with lock:
            start = time.monotonic()
            if not (folder / POLICY / "config.json").is_file():
                teachers = [self._weights(t, children)[0] for t in run.teachers()]
                self._make(run, folder, [str(path) for path in teachers], children)
            return folder / POLICY, time.monotonic() - start

    def _make(self, run: Run, folder: Path, teachers: list[str], children: Children) -> None:
        log = self.logs / "output" / f"{run.name}.log"
        if run.method in MERGES:
            command = [
                str(common.ROOT / "src" / "merge.py"),
                f"base={run.base}",
                f"checkpoints=[{','.join(teachers)}]",
                f"output={folder / POLICY}",
                f"seed={run.seed}",
                *MERGES[run.method],
            ]
            shutil.rmtree(folder / POLICY, ignore_errors=True)
        else:
            every = self.settings.long_every if run.method == MIX_LONG else self.settings.every
            command = [
                str(common.ROOT / "src" / "train.py"),
                *run.overrides(self.settings),
                f"run_name={run.name}",
                f"paths.log_dir={self.logs}",
                "resume=auto",
                "num_threads=1",
                # It is evaluated afterwards, from its checkpoints, with each item's outcome kept.
                "evaluate=false",
                "evaluation.every=0",
                f"callbacks.checkpoint.every={every}",
                "callbacks.checkpoint.keep=null",
                "callbacks.rollout_log.save=false",
            ]
            names = ("spatial", "temporal")
            command += [f"teachers.{n}={p}" for n, p in zip(names, teachers, strict=False)]
        children.run([sys.executable, *command], log)

    def _evaluate(
        self, run: Run, weights: Path | None, modality: str, children: Children
    ) -> dict[str, Any]:
        output = self.logs / "output"
        spec, out = (output / f"{run.name}.{modality}.{end}.json" for end in ("spec", "result"))
        checkpoints = self._folder(run) / CHECKPOINTS
        curve = self.settings.curve(run.method) if weights else []
        common.write_json(
            spec,
            {
                "overrides": [
                    f"data=mini_{modality}",
                    f"data.shortcut={SHORTCUT}",
                    f"data.evaluation_size={self.settings.items}",
                    f"base={run.base}",
                ],
                "final": weights and str(weights),
                "curve": {step: str(checkpoints / f"step_{step - 1:06d}.ckpt") for step in curve},
                "curve_items": self.settings.curve_items,
                "cross": None,
            },
        )
        script = common.ROOT / "benchmarks" / "mini_evaluate.py"
        log = output / f"{run.name}.log"
        children.run([sys.executable, str(script), str(spec), str(out)], log)
        result: dict[str, Any] = json.loads(out.read_text())
        spec.unlink()
        out.unlink()
        return result
