"""What is done with a trained policy: loading it, the final table, public benchmarks."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from reframe_vl import runs
from reframe_vl.checkpoint.reading import form_of, read_weights
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.evaluation import benchmark_results
from reframe_vl.evaluation.benchmark_report import reward_curves, write_report
from reframe_vl.evaluation.benchmark_run import BenchmarkRun
from reframe_vl.evaluation.outcomes import named_arms
from reframe_vl.evaluation.pass_at_k import pass_curve, sample_answers
from reframe_vl.evaluation.policy import evaluate_policy
from reframe_vl.evaluation.report import results, table
from reframe_vl.files import write_whole
from reframe_vl.policy.kinship import same_model
from reframe_vl.policy.loading import Policy
from reframe_vl.tools.base import close_tools

logger = logging.getLogger(__name__)


def evaluate(
    cfg: DictConfig, policy: Policy, base: Policy | None, path: Path, limit: int | None = None
) -> dict[str, Any]:
    """Evaluates a policy, and a base beside it, and writes and prints the results.

    Args:
        cfg: The whole config.
        policy: Evaluated.
        base: Evaluated beside it, where there is one.
        path: Of the results.
        limit: The first so many items; None: all.
    """
    settings, tools = instantiate(cfg.rollout.settings), instantiate(cfg.rollout.tools)
    data: SampleDataModule = instantiate(cfg.data)
    samples, conflict = data.evaluation_samples(limit), data.conflict_samples(limit)
    logger.info("Evaluating on %d items", len(samples))
    for evaluated in filter(None, (policy, base)):
        _to_accelerator(evaluated)
    try:
        played = [
            evaluate_policy(p, settings, tools, samples, conflict, cfg.evaluation.arms)
            for p in (policy, base)
            if p is not None
        ]
        report = results(*played)
        count, items = (cfg.evaluation.pass_at_k[name] for name in ("samples", "items"))
        for p, part in ((policy, report), (base, report["base"])) if count else ():
            if p is not None:
                answers = sample_answers(p, settings, tools, samples[:items], count)
                part["pass_at_k"] = pass_curve(answers)
    finally:
        close_tools(tools)
    _write(report, path)
    return show(report)


def _write(report: dict[str, Any], path: Path) -> None:
    write_whole(path, json.dumps(report, indent=2) + "\n")


def show(report: dict[str, Any]) -> dict[str, Any]:
    """Prints the results' table."""
    Console().print(table(report))
    return report


def evaluate_checkpoint(cfg: DictConfig) -> dict[str, Any]:
    """Evaluates the checkpoint ``cfg.ckpt``, and the model it was trained from beside it.

    Raises:
        ConfigError: The evaluation cannot be set up as configured.
    """
    with runs.readable_errors():
        OmegaConf.resolve(cfg)
        named_arms(cfg.evaluation.arms)
        torch.set_num_threads(cfg.num_threads or os.cpu_count() or 1)
        disable_progress_bar()
        out = Path(cfg.out or cfg.paths.run_dir) / runs.RESULTS
        out.parent.mkdir(parents=True, exist_ok=True)
    if cfg.benchmarks:
        return evaluate_on_benchmarks(cfg, out)
    _tell_what_differs(cfg)
    with runs.readable_errors():
        policy = load_checkpoint(cfg, Path(cfg.ckpt))
        base = instantiate(cfg.model) if cfg.evaluation.base else None
    report = evaluate(cfg, policy, base, out)
    logger.info("Wrote %s", out)
    return report


def evaluate_on_benchmarks(cfg: DictConfig, out: Path) -> dict[str, Any]:
    """Evaluates the checkpoint ``cfg.ckpt`` on public benchmarks (docs/evaluation.md).

    What was answered before, in the same folder, is not asked again.

    Raises:
        ConfigError: The evaluation cannot be set up as configured.
    """
    with runs.readable_errors():
        settings, tools = instantiate(cfg.rollout.settings), instantiate(cfg.rollout.tools)
    try:
        with runs.readable_errors():
            places = {name: instantiate(node) for name, node in cfg.benchmarks.items()}
            how = instantiate(cfg.benchmark_settings)
            run = BenchmarkRun(places, how, out.parent, str(cfg.ckpt), _loading(cfg.model))
        with runs.lock(out.parent):
            with runs.readable_errors():
                run.open(settings, tools)
                policy = _to_accelerator(load_checkpoint(cfg, Path(cfg.ckpt)))
            report = run.play(policy, settings, tools, instantiate(cfg.rollout.engine))
            _write(report, out)
    finally:
        close_tools(tools)
    run_of = _run_of(Path(cfg.ckpt))
    write_report(report, out.parent, reward_curves(run_of) if run_of else {})
    Console().print(benchmark_results.table(report))
    logger.info("Wrote %s and report.md, report.png beside it.", out)
    return report


def _run_of(ckpt: Path) -> Path | None:
    """The directory of the run that a checkpoint is from, where that is known."""
    ckpt = ckpt.absolute()
    folders = (ckpt, *ckpt.parents[:2])
    return next((folder for folder in folders if (folder / runs.IDENTITY).is_file()), None)


def _tell_what_differs(cfg: DictConfig) -> None:
    """Data and base are those of this command: a run is easily measured on, or beside, others."""
    run = _run_of(Path(cfg.ckpt))
    file = run and run / "config.yaml"
    if file is None or not file.is_file():
        return
    trained = OmegaConf.load(file)
    data = OmegaConf.select(trained, "data._target_")
    if data and data != cfg.data.get("_target_"):
        here = cfg.data.get("_target_")
        logger.warning("%s was trained on %s; this evaluates on %s (data=).", run, data, here)
    base = OmegaConf.select(trained, "model.path")
    if cfg.evaluation.base and base and not same_model(base, cfg.model.path):
        here = cfg.model.path
        logger.warning("%s was trained from %s; beside it stands %s (base=).", run, base, here)


def _loading(model: DictConfig) -> dict[str, Any]:
    """How a model is loaded, less what costs time and memory alone."""
    return {
        str(name): OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for name, value in model.items()
        if name not in ("gradient_checkpointing", "visual_cache")
    }


def _to_accelerator(policy: Policy) -> Policy:
    """A policy is loaded on the CPU, and Lightning puts it back there after a fit."""
    if torch.accelerator.is_available():
        policy.model.to(torch.accelerator.current_accelerator())
    return policy


def load_checkpoint(cfg: DictConfig, path: Path) -> Policy:
    """A policy from a run directory, a checkpoint folder or a run's ``.ckpt`` file.

    Raises:
        FileNotFoundError: There is no checkpoint at the path.
        ValueError: The checkpoint is not of ``cfg.model``.
    """
    if (path / runs.POLICY / "config.json").is_file():
        path = path / runs.POLICY
    if (path / "config.json").is_file():
        loaded: Policy = instantiate(cfg.model, path=str(path))
        return loaded
    if path.is_dir() and (latest := runs.latest_checkpoint(path)):
        path = latest
    if form_of(path) is None:
        raise FileNotFoundError(
            f"No checkpoint at {path}: give a run directory, a folder with config.json, or one of "
            "a run's complete checkpoints."
        )
    policy: Policy = instantiate(cfg.model)
    weights = read_weights(path)
    known = {name: value.shape for name, value in policy.model.state_dict().items()}
    if not {name: value.shape for name, value in weights.items()}.items() <= known.items():
        raise ValueError(
            f"{path} does not fit {policy.path}: set model to what it was trained from."
        )
    trained = {name for name, value in policy.model.named_parameters() if value.requires_grad}
    if missing := sorted(trained - weights.keys()):
        raise ValueError(
            f"{path} lacks parameters that model trains, {len(missing)} in all (first: "
            f"{missing[0]}), which would stay as they are in the base: set model to what it was "
            "trained with, lora and freeze_vision included, or give another checkpoint."
        )
    # Frozen parameters are the base's.
    policy.model.load_state_dict(weights, strict=False)
    return policy
