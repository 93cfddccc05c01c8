"""Evaluates the checkpoints of a run of a mini experiment: ``mini_evaluate.py SPEC.json OUT.json``.

The specification: ``overrides`` of the training config, whose data and rollouts are used;
``curve``, checkpoints by step; ``final``, the last checkpoint, or null for the frozen base;
``cross``, other overrides under which the last checkpoint is evaluated too, or null;
``curve_items``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from reframe_vl.evaluating import load_checkpoint
from reframe_vl.evaluation.outcomes import Arm, EvaluationResult
from reframe_vl.evaluation.packing import Items, items_of, pack
from reframe_vl.evaluation.policy import evaluate_policy
from reframe_vl.policy.loading import Policy
from reframe_vl.runs import register_resolvers

CURVE_ARMS = tuple(arm.value for arm in Arm if arm is not Arm.NO_TOOLS_MATCHED)


class Setting:
    """Data and rollouts of an experiment."""

    def __init__(self, overrides: list[str]) -> None:
        self.config: DictConfig = compose("train", overrides)
        self._rollout = instantiate(self.config.rollout.settings)
        self._tools = instantiate(self.config.rollout.tools)
        self._data = instantiate(self.config.data)

    def load(self, checkpoint: str | None) -> Policy:
        """A policy; the base that training starts from where no checkpoint is named."""
        if checkpoint is not None:
            return load_checkpoint(self.config, Path(checkpoint))
        policy: Policy = instantiate(self.config.model)
        return policy

    def items(self) -> Items:
        """All of them."""
        return items_of(self._data.evaluation_samples(), self._data.conflict_samples())

    def evaluate(
        self, policy: Policy, limit: int | None = None, arms: tuple[str, ...] | None = None
    ) -> EvaluationResult:
        """Plays the first so many items in all arms or in some."""
        return evaluate_policy(
            policy,
            self._rollout,
            self._tools,
            self._data.evaluation_samples(limit),
            self._data.conflict_samples(limit),
            arms,
        )


def evaluate(spec: dict[str, Any]) -> dict[str, Any]:
    """All evaluations of a run, packed, with the items they are on."""
    start = time.monotonic()
    setting = Setting(spec["overrides"])
    items = setting.items()
    last = setting.load(spec["final"])
    result: dict[str, Any] = {
        "items": asdict(items),
        "final": pack(setting.evaluate(last), items),
        "curve": {
            step: pack(
                setting.evaluate(setting.load(checkpoint), spec["curve_items"], CURVE_ARMS), items
            )
            for step, checkpoint in spec["curve"].items()
        },
        "cross": None,
    }
    if spec["cross"] is not None:
        other = Setting(spec["cross"])
        items = other.items()
        result["cross"] = {"items": asdict(items), "final": pack(other.evaluate(last), items)}
    result["seconds"] = time.monotonic() - start
    return result


def main() -> None:
    """Reads the specification and writes the evaluations."""
    spec, out = (Path(path) for path in sys.argv[1:3])
    register_resolvers()
    torch.set_num_threads(1)
    disable_progress_bar()
    with initialize_config_dir(str(common.ROOT / "configs"), version_base="1.3"):
        result = evaluate(json.loads(spec.read_text()))
    common.write_json(out, result, indent=None)


if __name__ == "__main__":
    main()
