"""One training run from its composed config: fit and export, and then its final table."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra.utils import instantiate
from lightning import seed_everything
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from transformers.utils.logging import disable_progress_bar

from reframe_vl import runs, slurm
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.graceful_stop import GracefulStop
from reframe_vl.callbacks.rollout import RolloutCallback
from reframe_vl.checkpoint.card import model_card
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.checkpoint.reading import form_of, read_progress
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.evaluating import evaluate, load_checkpoint, show
from reframe_vl.evaluation.outcomes import named_arms
from reframe_vl.policy.sharding import is_sharded
from reframe_vl.strategies import DeepSpeedZeRO, check_resumable

logger = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, Any]:
    """Trains, or goes on with, the run of ``cfg.paths.run_dir``.

    Returns:
        The final results; empty where evaluation is off.

    Raises:
        ConfigError: The run cannot be set up as configured.
        SystemExit: A signal stopped it; the run can go on.
    """
    with open_run(cfg) as run:
        if run.finished is not None:
            return show(run.finished)
        with runs.readable_errors():
            prepare(cfg)
            trainer, module, data = _assemble(cfg, run.checkpoint)
            start(cfg, run, trainer, module, data)
        return fit(cfg, run, trainer, module, data)


@dataclass(frozen=True)
class OpenRun:
    """A run that this process works on.

    Attributes:
        folder: Its directory.
        checkpoint: What it goes on from; None for a fresh run.
        finished: Its results, where it has them already.
    """

    folder: Path
    checkpoint: Path | None
    finished: dict[str, Any] | None


@contextmanager
def open_run(cfg: DictConfig) -> Iterator[OpenRun]:
    """Takes a run's directory: free, or the same run's that is to go on.

    Raises:
        ConfigError: The directory cannot be had, or holds another run.
    """
    runs.check(cfg)
    folder = Path(cfg.paths.run_dir)
    with runs.lock(folder), slurm.requeued_on_signal():
        with runs.readable_errors():
            runs.begin(cfg, folder)
            logger.info("Run: %s", folder)
            finished = runs.read_results(folder, cfg.steps) if cfg.resume else None
            if finished is not None:
                logger.info("This run is finished: %s", folder / runs.RESULTS)
            checkpoint = None if finished else _checkpoint(cfg, folder)
            _check_steps(cfg, checkpoint)
        yield OpenRun(folder, checkpoint, finished)


def prepare(cfg: DictConfig) -> None:
    """What comes before anything of a run is made: seeds, threads, and less of others' output.

    Raises:
        ValueError: The final table asks for an arm that there is not.
    """
    # Lightning's lines say what is known here, or advertise.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_progress_bar()
    # Lightning's own use of torch, which nobody here can change.
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec")
    # The module opens the loader's batches, whatever data there are.
    warnings.filterwarnings("ignore", message=r"You have overridden `on_before_batch_transfer`")
    seed_everything(cfg.seed, verbose=False)
    torch.set_num_threads(cfg.num_threads or os.cpu_count() or 1)
    named_arms(cfg.evaluation.arms)


def _assemble(
    cfg: DictConfig, checkpoint: Path | None
) -> tuple[Trainer, PolicyModule, SampleDataModule]:
    """Everything that training needs, the model last: what is wrong is told before it loads."""
    callbacks = [instantiate(node) for node in cfg.callbacks.values() if node is not None]
    data: SampleDataModule = instantiate(cfg.data)
    purge = purged(checkpoint)
    loggers = [instantiate(node, **purge) for node in (cfg.logger or {}).values()]
    # Beside its own plugins; none of both is no setting.
    plugins = [*(instantiate(cfg.trainer.get("plugins")) or []), *slurm.plugins()] or None
    trainer: Trainer = instantiate(
        cfg.trainer, callbacks=callbacks, logger=loggers, plugins=plugins
    )
    return trainer, instantiate(cfg.algorithm)(policy=instantiate(cfg.model)), data


def start(
    cfg: DictConfig, run: OpenRun, trainer: Trainer, module: PolicyModule, data: SampleDataModule
) -> None:
    """Makes sure that the parts fit, and records what the run is.

    Raises:
        ValueError: The algorithm needs larger groups than are played, or cannot begin.
    """
    for rollouts in _callbacks(trainer, RolloutCallback):
        rollouts.check_group(module)
    module.check_start(data)
    if run.checkpoint is not None:
        check_resumable(trainer.strategy, run.checkpoint)
        logger.info("Going on from %s", run.checkpoint)
    runs.claim(cfg, run.folder)


def fit(
    cfg: DictConfig, run: OpenRun, trainer: Trainer, module: PolicyModule, data: SampleDataModule
) -> dict[str, Any]:
    """Trains, exports the policy, and evaluates it.

    Returns:
        The final results; empty where evaluation is off.

    Raises:
        SystemExit: A signal stopped it; the run can go on.
    """
    trainer.fit(module, datamodule=data, ckpt_path=run.checkpoint, weights_only=False)
    for stop in _callbacks(trainer, GracefulStop):
        if stop.received is not None:
            _stopped(stop.received, trainer.current_epoch, run.folder)
    policy = module.components
    if isinstance(trainer.strategy, DeepSpeedZeRO):
        if not trainer.is_global_zero:
            return {}
        # DeepSpeed's own parts are let go by now: the last checkpoint has them.
        policy = load_checkpoint(cfg, run.folder)
    export_policy(
        policy, run.folder / runs.POLICY, _card(cfg, trainer), writes=trainer.is_global_zero
    )
    if not cfg.evaluate or not trainer.is_global_zero:
        return {}
    try:
        if is_sharded(policy.model):
            policy = load_checkpoint(cfg, run.folder / runs.POLICY)
        # As it was exported.
        policy.model.narrow()
        base = instantiate(cfg.model) if cfg.evaluation.base else None
        report = evaluate(cfg, policy, base, run.folder / runs.RESULTS)
        logger.info("Results: %s", run.folder / runs.RESULTS)
        return report
    except KeyboardInterrupt:
        logger.warning("Evaluation was stopped. To do it: %s", runs.resume_command(run.folder))
        raise SystemExit(128 + signal.SIGINT) from None


def _card(cfg: DictConfig, trainer: Trainer) -> str:
    """What is said of a run's model to whoever finds it."""
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return model_card(
        str(cfg.model.path), OmegaConf.to_yaml(cfg, resolve=True), trainer.current_epoch, numbers
    )


def _stopped(received: signal.Signals, steps: int, folder: Path) -> NoReturn:
    """Ends the process as one that the signal ended, after saving; in SLURM it is started again.

    In a sweep, Hydra would start the next job otherwise, and a script take the run for finished.
    """
    logger.warning("%s: stopped after %d steps.", received.name, steps)
    if not (slurm.asks_for_requeue(received) and slurm.requeue()):
        logger.warning("To go on: %s", runs.resume_command(folder))
    raise SystemExit(128 + received)


def purged(checkpoint: Path | None) -> dict[str, Any]:
    """The setting of a logger that hides what an earlier attempt wrote after the checkpoint."""
    if checkpoint is None:
        return {}
    return {"purge_step": read_progress(checkpoint)["epoch"] + 1}


def _checkpoint(cfg: DictConfig, run: Path) -> Path | None:
    if not cfg.resume:
        return None
    named = Path(cfg.resume)
    chosen = named.parent.name == runs.CHECKPOINTS and form_of(named) is not None
    return named if chosen else runs.latest_checkpoint(run)


def _check_steps(cfg: DictConfig, checkpoint: Path | None) -> None:
    """Checks that a checkpoint is not beyond the run's end."""
    done = read_progress(checkpoint)["epoch"] + 1 if checkpoint else 0
    if done > cfg.steps:
        raise runs.ConfigError(
            f"{checkpoint} is of {done} steps, and steps={cfg.steps} are asked for: give "
            f"steps={done} or more, or an earlier checkpoint."
        )


def _callbacks(trainer: Trainer, kind: type[Any]) -> list[Any]:
    return [c for c in trainer.callbacks if isinstance(c, kind)]  # type: ignore[attr-defined]
