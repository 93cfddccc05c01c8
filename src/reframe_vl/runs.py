"""Run directories and how a run is found again: what ``resume`` means.

``resume=auto`` looks for the newest run with the same overrides: none, and a fresh one starts;
unfinished, and it goes on; finished, and nothing is done again. The same command can therefore be
given any number of times. ``resume=PATH`` names a run directory or a checkpoint.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
import shlex
import zipfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

logger = logging.getLogger(__name__)


class ConfigError(CompactHydraException):
    """A config that cannot be run; Hydra prints its sentence without a stack trace."""


RESULTS = "results.json"
CHECKPOINTS = "checkpoints"
POLICY = "policy"
_RUN_KEYS = ("resume=", "run_name=")
_NUMBERS: dict[str, tuple[type | tuple[type, ...], float]] = {
    "steps": (int, 1),
    "seed": (int, 0),
    "prompts_per_step": (int, 1),
    "rollouts_per_prompt": (int, 2),
    "warmup_updates": (int, 0),
    "lr": ((int, float), 0),
    "temperature": ((int, float), 0),
    "drop": ((int, float), 0),
}
"""The types and least values of what a command line changes most."""


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
    folder = Path(root) / experiment
    # One that does not exist is refused by ``check``: a resolver's error has no readable form.
    if resume and resume != "auto" and (path := Path(resume)).exists():
        return str(path.parent.parent if path.is_file() else path)
    own = [o for o in overrides if not o.startswith(_RUN_KEYS)]
    if run_name:
        return str(folder / run_name)
    if resume == "auto" and (found := _newest_like(folder, own)):
        return str(found)
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return str(folder / "_".join([stamp, *_summary(own)]))


def resume_command(run: str) -> str:
    """The command that goes on with a run: what started it, overrides included."""
    own = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    kept = [o for o in own if not o.startswith(_RUN_KEYS)]
    return shlex.join(["python", "src/train.py", *kept, f"resume={run}"])


def check(cfg: DictConfig) -> None:
    """Resolves a config and looks for the files it names.

    Raises:
        ConfigError: Something cannot be resolved or found.
    """
    try:
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    for name, (kind, least) in _NUMBERS.items():
        value: Any = cfg[name]
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or float(value) < least:
            whole = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name}={value} must be {whole} of at least {least}.")
    if cfg.resume and cfg.resume != "auto" and not Path(cfg.resume).exists():
        raise ConfigError(
            f"resume={cfg.resume} does not exist: give a run directory below "
            f"{cfg.paths.log_dir}, a checkpoint file, or resume=auto."
        )


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, by step; None before the first."""
    paths = sorted((run / CHECKPOINTS).glob("*.ckpt"), key=_step_of, reverse=True)
    for path in paths:
        # A file that was cut short has no archive directory at its end.
        if zipfile.is_zipfile(path):
            return path
        logger.warning("Checkpoint %s is incomplete and passed over.", path)
    return None


def lock(run: Path) -> IO[str]:
    """Keeps two processes out of one run directory, as long as the returned file is open.

    Raises:
        RuntimeError: Another process has it.
    """
    run.mkdir(parents=True, exist_ok=True)
    handle = (run / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise RuntimeError(
            f"Another process works in {run}: wait for it, or start a run of your own without "
            "resume."
        ) from error
    return handle


def _mini_base(index: int) -> str:
    # Loading the model code takes seconds: only where a mini is asked for.
    from reframe_vl.mini.model import base_folder

    return str(base_folder(index))


def _newest_like(folder: Path, overrides: list[str]) -> Path | None:
    for candidate in sorted(folder.glob("*"), reverse=True):
        recorded = candidate / ".hydra" / "overrides.yaml"
        if recorded.is_file():
            theirs = yaml.safe_load(recorded.read_text()) or []
            if sorted(o for o in theirs if not o.startswith(_RUN_KEYS)) == sorted(overrides):
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


def _step_of(path: Path) -> tuple[int, float]:
    digits = re.findall(r"\d+", path.stem)
    return (int(digits[-1]) if digits else -1, path.stat().st_mtime)
