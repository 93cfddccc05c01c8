"""Run directories and how a run is found again: what ``resume`` means.

``resume=auto`` looks for the newest run with the same overrides: none, and a fresh one starts;
unfinished, and it goes on; finished, and nothing is done again. The same command can therefore be
given any number of times. ``resume=PATH`` names a run directory or a checkpoint. A run goes on only
with the settings it was started with, and a fresh one never writes into another's directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shlex
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

logger = logging.getLogger(__name__)

RESULTS = "results.json"
CHECKPOINTS = "checkpoints"
POLICY = "policy"
IDENTITY = "run.json"
"""Overrides and settings that a run was started with; written once, inside the lock."""

_RUN_KEYS = ("resume=", "run_name=")
_FREE_ON_RESUME = frozenset(
    {"resume", "run_name", "paths", "callbacks", "logger", "trainer", "evaluation", "evaluate"}
    | {"steps", "num_threads"}
)
"""Settings that may change when a run goes on; what callbacks and trainer hold of the others is
compared where it is first named."""

_NUMBERS: dict[str, tuple[type | tuple[type, ...], float]] = {
    "steps": (int, 1),
    "seed": (int, 0),
    "prompts_per_step": (int, 1),
    "rollouts_per_prompt": (int, 1),
    "warmup_updates": (int, 0),
    "lr": ((int, float), 0),
    "temperature": ((int, float), 0),
    "drop": ((int, float), 0),
    "trainer.accumulate_grad_batches": (int, 1),
}
"""The types and least values of what a command line changes most."""


class ConfigError(CompactHydraException):
    """A config that cannot be run; Hydra prints its sentence without a stack trace."""


def register_resolvers() -> None:
    """Lets configs ask for their run directory and for the shipped base checkpoints."""
    # Cached, since every look at the config must give the same time stamp.
    OmegaConf.register_new_resolver("run_dir", run_directory, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("resume_command", resume_command, replace=True)
    OmegaConf.register_new_resolver("mini_base", _mini_base, replace=True)


def run_directory(
    root: str,
    experiment: str,
    resume: str | None,
    run_name: str | None,
    overrides: Sequence[str],
) -> str:
    """Where a run lives.

    Args:
        root: The log folder.
        experiment: The experiment's name, a folder below it.
        resume: ``auto``, a run directory, a checkpoint, or None for a fresh run.
        run_name: The folder's name; None makes one of the time and the overrides.
        overrides: The command line's, which tell runs apart.
    """
    # Absolute, since Hydra puts a relative one below a sweep's own folder.
    folder = Path(root).absolute() / experiment
    # One that does not exist is refused by ``check``: a resolver's error has no readable form.
    if resume and resume != "auto" and (run := _run_of(Path(resume))):
        return str(run.absolute())
    own = [o for o in overrides if not o.startswith(_RUN_KEYS)]
    if run_name:
        sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
        return str(folder / "_".join([run_name, *(_summary(own) if sweep else [])]))
    if resume == "auto" and (found := _newest_like(folder, own)):
        return str(found)
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return str(folder / "_".join([stamp, *_summary(own)]))


def resume_command(run: str) -> str:
    """The command that goes on with a run: what started it, overrides included."""
    own = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    kept = [o for o in own if not o.startswith(_RUN_KEYS)]
    return shlex.join(["python", "src/train.py", *kept, f"resume={run}"])


# ------------------------------------------------------------------ checks


@contextmanager
def readable_errors() -> Iterator[None]:
    """What goes wrong while a run is set up is told in a sentence, without a stack trace."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, LookupError) as error:
        raise ConfigError(f"{error}" if str(error) else type(error).__name__) from error


def check(cfg: DictConfig) -> None:
    """Resolves a training config and looks at the numbers and files it names.

    Raises:
        ConfigError: Something cannot be resolved, found or used.
    """
    try:
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    limits = {f"limits.{name}": (int, 1) for name in cfg.limits}
    for name, (kind, least) in {**_NUMBERS, **limits}.items():
        value: Any = OmegaConf.select(cfg, name)
        if value is None and name.endswith("_pixels"):
            continue
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or not float(value) >= least:
            whole = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name}={value} must be {whole} of at least {least}.")
    if not isinstance(cfg.evaluate, bool):
        raise ConfigError(f"evaluate={cfg.evaluate} must be true or false.")
    if cfg.resume and cfg.resume != "auto" and _run_of(Path(cfg.resume)) is None:
        raise ConfigError(
            f"resume={cfg.resume} is no run: it does not exist or has no {IDENTITY}. Give a run "
            f"directory below {cfg.paths.log_dir}, a file of its {CHECKPOINTS}/, or resume=auto."
        )


def begin(cfg: DictConfig, run: Path) -> None:
    """Checks that a run directory is free, or that the run in it is the same one.

    Raises:
        ConfigError: The directory holds a run that was not asked to go on, or another one.
    """
    path = run / IDENTITY
    if not path.is_file():
        return
    if not cfg.resume:
        raise ConfigError(
            f"{run} already holds a run: add resume=auto to go on with it, or give another "
            "run_name."
        )
    theirs, own = _flat(json.loads(path.read_text())["settings"]), _flat(_settings(cfg))
    changed = [
        f"{name}: was {theirs.get(name)}, is {own.get(name)}"
        for name in sorted(theirs.keys() | own.keys())
        if theirs.get(name) != own.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{run} was started with other settings, so it cannot go on with these:\n  "
            + "\n  ".join(changed)
            + "\nGive the same overrides, or start a run of its own without resume."
        )


def claim(cfg: DictConfig, run: Path) -> None:
    """Records what a run is, once it is set up: one that never was holds no directory."""
    path = run / IDENTITY
    if not path.is_file():
        overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
        kept = [o for o in overrides if not o.startswith(_RUN_KEYS)]
        identity = {"overrides": kept, "settings": _settings(cfg)}
        path.write_text(json.dumps(identity, indent=1) + "\n")
    OmegaConf.save(cfg, run / "config.yaml", resolve=True)


def _settings(cfg: DictConfig) -> dict[str, Any]:
    """What must not change when a run goes on, as JSON holds it."""
    chosen = {str(name): value for name, value in cfg.items() if name not in _FREE_ON_RESUME}
    plain = OmegaConf.to_container(OmegaConf.create(chosen))
    settings: dict[str, Any] = json.loads(json.dumps(plain))
    return settings


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, by step; None before the first."""
    paths = sorted((run / CHECKPOINTS).glob("step_*.ckpt"), reverse=True)
    for path in paths:
        # A file that was cut short has no archive directory at its end.
        if zipfile.is_zipfile(path):
            return path
        logger.warning("Checkpoint %s is incomplete and passed over.", path)
    return None


def read_results(run: Path) -> dict[str, Any] | None:
    """The results of a finished run; None where there are none, or they were cut short."""
    path = run / RESULTS
    if not path.is_file():
        return None
    try:
        results: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError:
        logger.warning("%s is not readable: the run is evaluated again.", path)
        return None
    return results


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Keeps two processes out of one run directory.

    Raises:
        ConfigError: Another process has it.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process works in {run}: wait for it, or start a run of your own without "
                "resume."
            ) from None
        yield


# ------------------------------------------------------------------ names


def _mini_base(index: int) -> str:
    # Loading the model code takes seconds: only where a mini is asked for.
    from reframe_vl.mini.model import base_folder

    return str(base_folder(index))


def _run_of(path: Path) -> Path | None:
    """The run directory that a path names: itself, or a checkpoint's."""
    run = path.parent.parent if path.is_file() and path.parent.name == CHECKPOINTS else path
    return run if (run / IDENTITY).is_file() else None


def _newest_like(folder: Path, overrides: list[str]) -> Path | None:
    for candidate in sorted(folder.glob("*"), reverse=True):
        identity = candidate / IDENTITY
        if identity.is_file():
            theirs = json.loads(identity.read_text())["overrides"]
            if sorted(theirs) == sorted(overrides):
                return candidate
    return None


def _summary(overrides: list[str]) -> list[str]:
    """A short form of the overrides, without the experiment's.

    Unique, and of characters that neither a shell nor Hydra reads as anything else.
    """
    own = [o for o in overrides if not o.startswith("experiment=")]
    if not own:
        return []
    text = re.sub(r"[^\w.-]+", "-", "_".join(own)).strip("-.")
    if len(text) > 60:
        text = f"{text[:50]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return [text]


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    if not isinstance(node, dict):
        return {path: node}
    flat: dict[str, Any] = {}
    for name, sub in node.items():
        flat |= _flat(sub, f"{path}.{name}".strip("."))
    return flat
