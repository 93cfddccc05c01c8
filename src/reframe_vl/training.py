"""One training run from its composed config: fit, export, final table."""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
import zipfile
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
from reframe_vl.callbacks.rollout import RolloutCallback
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.evaluation import benchmark_results
from reframe_vl.evaluation.benchmark_report import reward_curves, write_report
from reframe_vl.evaluation.benchmark_run import BenchmarkRun
from reframe_vl.evaluation.outcomes import named_arms
from reframe_vl.evaluation.pass_at_k import pass_curve, sample_answers
from reframe_vl.evaluation.policy import evaluate_policy
from reframe_vl.evaluation.report import results, table
from reframe_vl.policy.loading import Policy
from reframe_vl.tools.base import close_tools

logger = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, Any]:
    """Trains, or goes on with, the run of ``cfg.paths.run_dir``.

    Returns:
        The final results; empty where evaluation is off.

    Raises:
        ConfigError: The run cannot be set up as configured.
        SystemExit: A signal stopped it; the run can go on.
    """
    runs.check(cfg)
    run = Path(cfg.paths.run_dir)
    with runs.lock(run):
        with runs.readable_errors():
            runs.begin(cfg, run)
            logger.info("Run: %s", run)
            finished = runs.read_results(run) if cfg.resume else None
            if finished is not None:
                logger.info("This run is finished: %s", run / runs.RESULTS)
                return show(finished)
            checkpoint = _checkpoint(cfg, run)
            trainer, module, data = _set_up(cfg, checkpoint)
            runs.claim(cfg, run)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=False)
        for stop in _callbacks(trainer, GracefulStop):
            if stop.received is not None:
                # As of a process that the signal ended: in a sweep, Hydra would start the next
                # job, and a script would take the run for finished.
                raise SystemExit(128 + stop.received)
        export_policy(module.components, run / runs.POLICY)
        if not cfg.evaluate:
            return {}
        try:
            base = instantiate(cfg.model) if cfg.evaluation.base else None
            report = evaluate(cfg, module.components, base, run / runs.RESULTS)
            logger.info("Results: %s", run / runs.RESULTS)
            return report
        except KeyboardInterrupt:
            logger.warning("Evaluation was stopped. To do it: %s", runs.resume_command(str(run)))
            raise SystemExit(128 + signal.SIGINT) from None


def _set_up(
    cfg: DictConfig, checkpoint: Path | None
) -> tuple[Trainer, PolicyModule, SampleDataModule]:
    """Everything that training needs, the model last: what is wrong is told before it loads."""
    # Lightning's lines say what is known here, or advertise.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_progress_bar()
    # Lightning's own use of torch, which nobody here can change.
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec")
    seed_everything(cfg.seed, verbose=False)
    torch.set_num_threads(cfg.num_threads or os.cpu_count() or 1)
    named_arms(cfg.evaluation.arms)
    callbacks = [instantiate(node) for node in cfg.callbacks.values() if node is not None]
    data: SampleDataModule = instantiate(cfg.data)
    loggers = _loggers(cfg, checkpoint)
    trainer: Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    module: PolicyModule = instantiate(cfg.algorithm)(policy=instantiate(cfg.model))
    for rollouts in _callbacks(trainer, RolloutCallback):
        rollouts.check_group(module)
    if checkpoint is not None:
        logger.info("Going on from %s", checkpoint)
    return trainer, module, data


def _loggers(cfg: DictConfig, checkpoint: Path | None) -> list[Any]:
    """Loggers that hide what an earlier attempt wrote after the checkpoint."""
    purge: dict[str, Any] = {}
    if checkpoint is not None:
        state = torch.load(checkpoint, map_location="cpu", weights_only=False)
        purge = {"purge_step": state["epoch"] + 1}
    return [instantiate(node, **purge) for node in (cfg.logger or {}).values()]


def _checkpoint(cfg: DictConfig, run: Path) -> Path | None:
    if not cfg.resume:
        return None
    named = Path(cfg.resume)
    return named if named.is_file() else runs.latest_checkpoint(run)


def _callbacks(trainer: Trainer, kind: type[Any]) -> list[Any]:
    return [c for c in trainer.callbacks if isinstance(c, kind)]  # type: ignore[attr-defined]


# ------------------------------------------------------------------ evaluation


def evaluate(cfg: DictConfig, policy: Policy, base: Policy | None, path: Path) -> dict[str, Any]:
    """Evaluates a policy, and a base beside it, and writes and prints the results."""
    settings, tools = instantiate(cfg.rollout.settings), instantiate(cfg.rollout.tools)
    data: SampleDataModule = instantiate(cfg.data)
    samples, conflict = data.evaluation_samples(), data.conflict_samples()
    logger.info("Evaluating on %d items", len(samples))
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
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(temporary, path)


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
    settings, tools = instantiate(cfg.rollout.settings), instantiate(cfg.rollout.tools)
    places = {name: instantiate(node) for name, node in cfg.benchmarks.items()}
    run = BenchmarkRun(places, instantiate(cfg.benchmark_settings), out.parent, str(cfg.ckpt))
    try:
        with runs.readable_errors():
            run.open(settings, tools)
            policy = load_checkpoint(cfg, Path(cfg.ckpt))
        report = run.play(policy, settings, tools, instantiate(cfg.rollout.engine))
    finally:
        close_tools(tools)
    _write(report, out)
    ckpt = Path(cfg.ckpt).absolute()
    trained = [folder for folder in (ckpt, *ckpt.parents[:2]) if (folder / runs.IDENTITY).is_file()]
    write_report(report, out.parent, reward_curves(trained[0]) if trained else {})
    Console().print(benchmark_results.table(report))
    logger.info("Wrote %s and report.md, report.png beside it.", out)
    return report


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
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise FileNotFoundError(
            f"No checkpoint at {path}: give a run directory, a folder with config.json, or a "
            "complete .ckpt file."
        )
    policy: Policy = instantiate(cfg.model)
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    weights = {name.removeprefix("policy."): value for name, value in state.items()}
    known = {name: value.shape for name, value in policy.model.state_dict().items()}
    if not {name: value.shape for name, value in weights.items()}.items() <= known.items():
        raise ValueError(
            f"{path} does not fit {policy.path}: set model to what it was trained from."
        )
    policy.model.load_state_dict(weights, strict=False)
    return policy
