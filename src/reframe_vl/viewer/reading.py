"""Finds the rollouts of some runs, and what else their folders say about them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reframe_vl.rewards.total import RewardWeights
from reframe_vl.rollout.json_field import Field
from reframe_vl.rollout.read_line import read_rollout, read_view
from reframe_vl.rollout.store import RolloutStore, parse_line, rollout_folders
from reframe_vl.types import Rollout

logger = logging.getLogger(__name__)

_REWARD = "reframe_vl.rewards.total.RewardWeights"


@dataclass(frozen=True)
class Run:
    """A run whose rollouts are shown.

    Attributes:
        path: The run's directory, or a folder of rollouts.
        name: Tells it from the other runs.
        config: As it was resolved; empty where the run's is not there.
    """

    path: Path
    name: str
    config: dict[str, Any]

    @property
    def model(self) -> str:
        """What it was trained from: a folder, or a name on the model hub; empty if not known."""
        return str((self.config.get("model") or {}).get("path") or "")

    def factors(self, step: int) -> dict[str, float] | None:
        """What each reward component was multiplied by; None where the config does not say."""
        reward = self.config.get("reward") or {}
        if reward.get("_target_") != _REWARD:
            return None
        names = ("call", "kappa", "grounding", "penalty", "tool_use")
        known: dict[str, Any] = {n: float(reward[n]) for n in names if n in reward}
        weights = RewardWeights(**known)
        steps = self.config.get("steps") or 0
        return weights.factors(min(1.0, step / steps) if steps > 0 else 0.0)


@dataclass(frozen=True)
class Entry:
    """A rollout with its line.

    Attributes:
        run: Number of its run.
        line: As it was written, the texts for people among it.
        rollout: As it was read, without pixels.
        file: The step's file; images lie beside it.
    """

    run: int
    step: int
    line: Field
    rollout: Rollout
    file: Path


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Names the runs by the ends of their paths, as far as it takes to tell them apart.

    Raises:
        FileNotFoundError: A path has no rollouts.
        ValueError: A path is given twice.
    """
    roots = [(p.parent if p.name == "rollouts" else p).resolve() for p in paths]
    for path, root in zip(paths, roots, strict=True):
        rollout_folders(path)
        if roots.count(root) > 1:
            raise ValueError(f"{path} is named twice: name each run once.")
    return [
        Run(path, _short_name(root, roots), _config(root))
        for path, root in zip(paths, roots, strict=True)
    ]


def entries(runs: Sequence[Run], steps: slice) -> Iterator[Entry]:
    """The rollouts of some steps of all runs, in the order in which they were written.

    Args:
        runs: Where from.
        steps: Which of them, by their numbers: ``slice(0, 100, 20)`` is 0, 20, 40, 60 and 80.

    Raises:
        RecordError: A line cannot be read.
    """
    for number, run in enumerate(runs):
        for folder in rollout_folders(run.path):
            store = RolloutStore(folder)
            for step in store.steps():
                if step not in range(*steps.indices(step + 1)):
                    continue
                file = store.file(step)
                for place, text in enumerate(file.read_bytes().splitlines(), 1):
                    line = parse_line(text, f"{file}, line {place}")
                    yield Entry(number, step, line, read_rollout(line, read_view), file)


def _short_name(root: Path, roots: Sequence[Path]) -> str:
    """The fewest last parts of a path, but two, that no other path ends in."""
    others = [other for other in roots if other != root]
    for count in range(2, len(root.parts)):
        tail = root.parts[-count:]
        if all(other.parts[-count:] != tail for other in others):
            return "/".join(tail)
    return str(root)


def _config(root: Path) -> dict[str, Any]:
    path = root / "config.yaml"
    if not path.is_file():
        return {}
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, OSError, ValueError) as error:
        logger.warning("%s cannot be read, so reward weights are not shown: %s", path, error)
        return {}
    return {str(k): v for k, v in config.items()} if isinstance(config, dict) else {}
