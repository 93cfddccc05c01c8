"""Run directories and how a run is found again: what ``resume`` means.

``resume=auto`` looks for the newest run with the same overrides: none, and a fresh one starts;
unfinished, and it goes on; finished, and nothing is done again. The same command can therefore be
given any number of times. ``resume=PATH`` names a run directory or a checkpoint. A run goes on only
with the settings it was started with; a fresh one never writes into another's directory. The run
of a SLURM job is named after the job, so that the same job, started again, finds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reframe_vl import slurm
from reframe_vl.files import write_whole

logger = logging.getLogger(__name__)

RESULTS = "results.json"
CHECKPOINTS = "checkpoints"
POLICY = "policy"
IDENTITY = "run.json"
"""Overrides and settings that a run was started with; written once, inside the lock."""

_RUN_KEYS = ("resume=", "run_name=", "launcher=")
"""Overrides that say how and where a run is started, and nothing of what it is."""

_FREE_ON_RESUME = frozenset(
    {"resume", "run_name", "paths", "callbacks", "logger", "trainer", "evaluation", "evaluate"}
    | {"steps", "num_threads"}
)
"""Settings that may change when a run goes on; what callbacks and trainer hold of the others is
compared where it is first named."""

_METHOD_CALLBACKS = ("gate", "ground_drop")
"""Callbacks whose settings are part of the method, so they may not change."""

_FOLLOWS = ("algorithm.teachers.context_tokens",)
"""Settings that repeat others, which are compared."""

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
    OmegaConf.register_new_resolver("resume_of_job", resume_of_job, replace=True)
    OmegaConf.register_new_resolver("mini_base", _mini_base, replace=True)


class RegisterResolvers(Callback):
    """Registers them in a process that Hydra's launchers start, before it looks at its config."""

    def __init__(self) -> None:
        """Of the process at hand."""
        register_resolvers()

    def __reduce__(self) -> tuple[type[RegisterResolvers], tuple[()]]:
        """It reaches the other process pickled, and is made anew there."""
        return RegisterResolvers, ()


def resume_of_job() -> str | None:
    """What ``resume`` is where it is not given: a requeued SLURM job goes on with its own run."""
    return "job" if slurm.restarted() else None


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
        resume: ``auto``, ``job``, a run directory, a checkpoint, or None for a fresh run.
        run_name: The folder's name; None makes one of the time and the overrides.
        overrides: The command line's, which tell runs apart.
    """
    saved = [o.partition("=")[2] for o in overrides if o.startswith("config=")]
    # Absolute, since Hydra puts a relative one below a sweep's own folder.
    folder = Path(root).absolute() / (_experiment_of(saved[-1]) if saved else experiment)
    # One that does not exist is refused by ``check``: a resolver's error has no readable form.
    if _names_run(resume) and (run := _run_of(Path(str(resume)))):
        return str(run.absolute())
    own = [o for o in overrides if not o.startswith(_RUN_KEYS)]
    if run_name:
        sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
        return str(folder / "_".join([run_name, *(_summary(own) if sweep else [])]))
    if resume == "auto" and (found := _newest_like(folder, own)):
        return str(found)
    job = slurm.job_name()
    stamp = f"job_{job}" if job else datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return str(folder / "_".join([stamp, *_summary(own)]))


def resume_command(run: Path) -> str:
    """The command that goes on with a run: what started it, overrides included."""
    entry, own = ["src/train.py"], []
    if HydraConfig.initialized():
        own = [o for o in HydraConfig.get().overrides.task if not o.startswith(_RUN_KEYS)]
        if HydraConfig.get().job.name == "cli":
            entry = ["src/cli.py", "fit"]
    return shlex.join(["python", *entry, *own, f"resume={run}"])


def _names_run(resume: str | None) -> bool:
    """Whether ``resume`` is a path."""
    return bool(resume) and resume not in ("auto", "job")


# ------------------------------------------------------------------ checks


@contextmanager
def readable_errors() -> Iterator[None]:
    """What goes wrong while a run is set up is told in a sentence, without a stack trace."""
    try:
        yield
    except InstantiationException as error:
        # Hydra wraps what a part says of its settings; it names the part.
        told = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
        if not isinstance(error.__cause__, ValueError | OSError | RuntimeError | LookupError):
            raise
        raise ConfigError((f"{told[1]}: " if told else "") + _sentence(error.__cause__)) from error
    except (ValueError, TypeError, OSError, RuntimeError, LookupError) as error:
        raise ConfigError(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    # A key error's text is its message in quotes.
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return message or type(error).__name__


def check_start(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Looks at how a run is started, before anything is loaded.

    Args:
        cfg: The composed tree.
        overrides: Those that it was composed with.

    Raises:
        ConfigError: Something that was given would have no effect.
    """
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN and "submitit" in str(
        hydra.runtime.choices["hydra/launcher"]
    ):
        raise ConfigError(
            f"launcher={hydra.runtime.choices['launcher']} starts the jobs of a multirun: add -m, "
            "or submit one run with scripts/train.sbatch (docs/cluster.md)."
        )
    if cfg.config:
        check_beside(cfg.config, overrides)


def check_beside(config: str | Path, overrides: Sequence[str]) -> None:
    """Refuses overrides that a saved config would undo.

    Raises:
        ConfigError: There are some.
    """
    free = ("config=", "paths.", "hydra.", *_RUN_KEYS)
    if other := [o for o in overrides if not o.startswith(free)]:
        raise ConfigError(
            f"{' '.join(other)} cannot be set beside the config {config}, which has a value for "
            "everything already: change it there, or give it to src/cli.py as an option."
        )


def _check_precision(cfg: DictConfig) -> None:
    given, dtype = str(cfg.trainer.get("precision")), cfg.model.get("dtype", "float32")
    # Lightning's older names.
    precision = {"bf16": "bf16-mixed", "16": "16-mixed"}.get(given, given)
    mixed = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
    if precision in ("bf16-true", "16-true"):
        raise ConfigError(
            f"trainer.precision={precision} rounds the weights after every update, and most "
            "updates away: take bf16-mixed, which computes in half precision and keeps what is "
            "trained in single."
        )
    if dtype in mixed and precision != mixed[dtype]:
        raise ConfigError(
            f"model.dtype={dtype} computes in half precision, and trainer.precision={precision} "
            f"does not: set trainer.precision={mixed[dtype]}, or model.dtype=float32."
        )


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
    _check_precision(cfg)
    if "TORCHELASTIC_RUN_ID" in os.environ and not (cfg.run_name or _names_run(cfg.resume)):
        raise ConfigError(
            "torchrun started several processes, which must share one run directory: add "
            "run_name=NAME, or resume=RUN to go on with one."
        )
    if _names_run(cfg.resume) and _run_of(Path(cfg.resume)) is None:
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
    if not path.is_file() or not is_first_rank():
        return
    if not cfg.resume:
        raise ConfigError(
            f"{run} already holds a run: add resume=auto to go on with it, or give another "
            "run_name."
        )
    stored = json.loads(path.read_text())["settings"]
    now = _settings(cfg)
    if "callbacks" not in stored:
        # It was started before they were kept.
        now.pop("callbacks", None)
    theirs, own = _flat(stored), _flat(now)
    changed = []
    for name in sorted(theirs.keys() | own.keys()):
        was, is_now = theirs.get(name), own.get(name)
        if was == is_now or name in _FOLLOWS:
            continue
        if _is_url(was) and _is_url(is_now):
            logger.warning("%s was %s, is %s: taken for the same server.", name, was, is_now)
        else:
            changed.append(f"{name}: was {was}, is {is_now}")
    if changed:
        raise ConfigError(
            f"{run} was started with other settings, so it cannot go on with these:\n  "
            + "\n  ".join(changed)
            + "\nGive the same overrides, or start a run of its own: with another run_name (make "
            "reframe NAME=…), or without resume."
        )


def claim(cfg: DictConfig, run: Path) -> None:
    """Records what a run is, once it is set up: one that never was holds no directory."""
    path = run / IDENTITY
    if not is_first_rank():
        return
    # Before the settings, which other ranks read first.
    _set_aside(run)
    # Other commands read those of all runs.
    write_whole(run / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    if not path.is_file():
        overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
        kept = [o for o in overrides if not o.startswith(_RUN_KEYS)]
        identity = {"overrides": kept, "settings": _settings(cfg)}
        write_whole(path, json.dumps(identity, indent=1) + "\n")


def _set_aside(run: Path) -> None:
    """Keeps what a finished run that goes on has, under other names: it is finished no longer."""
    if not (run / RESULTS).is_file():
        return
    steps = _steps(run)
    for name in (POLICY, RESULTS):
        path = run / name
        if path.exists():
            kept = path.with_name(f"{path.stem}_{steps}_steps{path.suffix}")
            if kept.is_dir():
                shutil.rmtree(kept)
            path.replace(kept)


def _settings(cfg: DictConfig) -> dict[str, Any]:
    """What must not change when a run goes on, as JSON holds it."""
    chosen = {str(name): value for name, value in cfg.items() if name not in _FREE_ON_RESUME}
    if callbacks := cfg.get("callbacks"):
        chosen["callbacks"] = {name: callbacks.get(name) for name in _METHOD_CALLBACKS}
    plain = OmegaConf.to_container(OmegaConf.create(chosen))
    settings: dict[str, Any] = json.loads(json.dumps(plain))
    return settings


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, by step; None before the first."""
    for path in sorted((run / CHECKPOINTS).glob("step_*.ckpt"), reverse=True):
        # Loading torch takes seconds: only where there is something to read.
        from reframe_vl.checkpoint.reading import form_of

        if form_of(path) is not None:
            return path
        logger.warning("Checkpoint %s is incomplete and passed over.", path)
    return None


def read_results(run: Path, steps: int = 0) -> dict[str, Any] | None:
    """The results of a finished run.

    Args:
        run: Its directory.
        steps: That it must have had; 0 takes any.

    Returns:
        None where there are none, they were cut short, or they are of fewer steps.
    """
    done = _steps(run)
    path = run / RESULTS
    try:
        results: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:
        logger.warning("%s is not readable: the run is evaluated again.", path)
        return None
    if done is not None and done < steps:
        logger.info("The run was finished with steps=%d: it goes on to %d.", done, steps)
        return None
    return results


def _steps(run: Path) -> int | None:
    """The steps that a run was last started with."""
    file = run / "config.yaml"
    return OmegaConf.select(OmegaConf.load(file), "steps") if file.is_file() else None


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Keeps two processes out of one run directory.

    Raises:
        ConfigError: Another process has it.
    """
    run.mkdir(parents=True, exist_ok=True)
    if not is_first_rank():
        # Of the run that the first one has the lock for.
        yield
        return
    with (run / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process works in {run}: wait for it, or take a folder of your own (a run "
                "without resume, an evaluation with another out)."
            ) from None
        yield


def is_first_rank() -> bool:
    """Whether this is a run's first process, or the only one, by what launchers set."""
    rank = next((os.environ[n] for n in ("RANK", "SLURM_PROCID") if n in os.environ), None)
    if rank is None:
        # Lightning's own launcher.
        return all(int(os.environ.get(n, 0)) == 0 for n in ("LOCAL_RANK", "NODE_RANK"))
    return int(rank) == 0


# ------------------------------------------------------------------ names


def _mini_base(index: int) -> str:
    # Loading the model code takes seconds: only where a mini is asked for.
    from reframe_vl.mini.model import base_folder

    return str(base_folder(index))


def _experiment_of(config: str) -> str:
    """The experiment of a saved config; one that cannot be read is told of when it is read."""
    text = Path(config).read_text() if Path(config).is_file() else ""
    found = re.search(r"^ *experiment_name: (\w+)$", text, re.MULTILINE)
    return found[1] if found else "saved"


def _run_of(path: Path) -> Path | None:
    """The run directory that a path names: itself, or a checkpoint's."""
    run = path.parent.parent if path.exists() and path.parent.name == CHECKPOINTS else path
    return run if (run / IDENTITY).is_file() else None


def _newest_like(folder: Path, overrides: list[str]) -> Path | None:
    # By when they were started: names of SLURM jobs do not tell.
    identities = sorted(folder.glob(f"*/{IDENTITY}"), key=lambda p: p.stat().st_mtime_ns)
    for identity in reversed(identities):
        theirs = json.loads(identity.read_text())["overrides"]
        if sorted(theirs) == sorted(overrides):
            return identity.parent
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


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("http://", "https://"))


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    if not isinstance(node, dict):
        return {path: node}
    flat: dict[str, Any] = {}
    for name, sub in node.items():
        flat |= _flat(sub, f"{path}.{name}".strip("."))
    return flat
