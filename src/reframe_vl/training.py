"""One training run from its composed config: fit, export, final table."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import seed_everything
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from reframe_vl import runs
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.graceful_stop import GracefulStop
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.evaluation.policy import evaluate_policy
from reframe_vl.evaluation.report import results, table
from reframe_vl.policy.loading import Policy

logger = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, Any]:
    """Trains, or goes on with, the run of ``cfg.paths.run_dir``.

    Returns:
        The final results; empty where the run was stopped or evaluation is off.
    """
    runs.check(cfg)
    run = Path(cfg.paths.run_dir)
    with runs.lock(run):
        finished = run / runs.RESULTS
        if cfg.resume and finished.is_file():
            logger.info("This run is finished: %s", finished)
            return show(json.loads(finished.read_text()))
        checkpoint = _checkpoint(cfg, run)
        OmegaConf.save(cfg, run / "config.yaml", resolve=True)
        module, stopped = _fit(cfg, checkpoint)
        if stopped:
            return {}
        export_policy(module.components, run / runs.POLICY)
        if not cfg.evaluate:
            return {}
        base = instantiate(cfg.model) if cfg.evaluation.base else None
        return evaluate(cfg, module.components, base, finished)


def _fit(cfg: DictConfig, checkpoint: Path | None) -> tuple[PolicyModule, bool]:
    """Trains to the end or to a signal; says which."""
    # Lightning's lines say what is known here, or advertise.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_progress_bar()
    seed_everything(cfg.seed, verbose=False)
    torch.set_num_threads(cfg.num_threads or os.cpu_count() or 1)
    loggers = _loggers(cfg, checkpoint)
    callbacks = [instantiate(node) for node in cfg.callbacks.values() if node is not None]
    data = instantiate(cfg.data)
    trainer: Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    module: PolicyModule = instantiate(cfg.algorithm)(policy=instantiate(cfg.model))
    if checkpoint is not None:
        logger.info("Going on from %s", checkpoint)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    stopped = any(isinstance(c, GracefulStop) and c.received is not None for c in callbacks)
    return module, stopped


def _loggers(cfg: DictConfig, checkpoint: Path | None) -> list[Any]:
    """Loggers that hide what an earlier attempt wrote after the checkpoint."""
    purge: dict[str, Any] = {}
    if checkpoint is not None:
        state = torch.load(checkpoint, map_location="cpu", weights_only=False)
        purge = {"purge_step": state["epoch"] + 1}
    return [instantiate(node, **purge) for node in cfg.logger.values()]


def _checkpoint(cfg: DictConfig, run: Path) -> Path | None:
    if not cfg.resume:
        return None
    named = Path(cfg.resume)
    return named if named.is_file() else runs.latest_checkpoint(run)


def evaluate(cfg: DictConfig, policy: Policy, base: Policy | None, path: Path) -> dict[str, Any]:
    """Evaluates a policy, and a base beside it, and writes and prints the results."""
    settings, tools = instantiate(cfg.rollout.settings), instantiate(cfg.rollout.tools)
    data: SampleDataModule = instantiate(cfg.data)
    samples, conflict = data.evaluation_samples(), data.conflict_samples()
    logger.info("Evaluating on %d items", len(samples))
    played = [
        evaluate_policy(p, settings, tools, samples, conflict, cfg.evaluation.arms)
        for p in (policy, base)
        if p is not None
    ]
    report = results(*played)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(temporary, path)
    return show(report)


def show(report: dict[str, Any]) -> dict[str, Any]:
    """Prints the results' table."""
    Console().print(table(report))
    return report


def evaluate_checkpoint(cfg: DictConfig) -> dict[str, Any]:
    """Evaluates the checkpoint ``cfg.ckpt``, and the model it was trained from beside it."""
    torch.set_num_threads(cfg.num_threads or os.cpu_count() or 1)
    out = Path(cfg.out or cfg.paths.run_dir) / runs.RESULTS
    out.parent.mkdir(parents=True, exist_ok=True)
    base = instantiate(cfg.model) if cfg.evaluation.base else None
    report = evaluate(cfg, _load(cfg, Path(cfg.ckpt)), base, out)
    logger.info("Wrote %s", out)
    return report


def _load(cfg: DictConfig, path: Path) -> Policy:
    """A policy from a run directory, a checkpoint folder or a Lightning checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint at the path.
    """
    if (path / runs.POLICY / "config.json").is_file():
        path = path / runs.POLICY
    if (path / "config.json").is_file():
        return instantiate(cfg.model, path=str(path))
    if path.is_dir() and (latest := runs.latest_checkpoint(path)):
        path = latest
    if not path.is_file():
        raise FileNotFoundError(
            f"No checkpoint at {path}: give a run directory, a folder with config.json, or a "
            ".ckpt file."
        )
    policy: Policy = instantiate(cfg.model)
    state = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
    weights = {name.removeprefix("policy."): value for name, value in state.items()}
    report = policy.model.load_state_dict(weights, strict=False)
    trainable = {name for name, _ in policy.model.named_parameters()}
    if report.unexpected_keys or not weights.keys() & trainable:
        raise ValueError(
            f"{path} does not fit {policy.path}: set model to what it was trained from."
        )
    return policy
