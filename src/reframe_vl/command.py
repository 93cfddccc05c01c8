"""The command line of ``src/cli.py``: Hydra's overrides and Lightning's options side by side.

Loads neither torch nor Lightning, so that a mistyped override is told at once.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from reframe_vl.runs import run_directory

NAME = "cli"
"""What Hydra calls the job; the log is named after it."""

_OVERRIDE = re.compile(r"~[\w/@.]+$|[+~]{0,2}\w[\w/@.:-]*=")
_FLAGS = ("-h", "--help", "--print_config", "--print_shtab")
"""Options that take no value, or one behind an equals sign."""


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        subcommand: ``fit``, ``validate`` or ``test``; empty where none is given.
        overrides: Hydra's: ``key=value``, ``+key=value`` or ``~key``.
        options: All else, in its order.
    """

    subcommand: str
    overrides: list[str]
    options: list[str]


def split(arguments: Sequence[str]) -> Command:
    """Tells overrides from options.

    >>> split(["fit", "seed=1", "--trainer.max_steps", "10", "--print_config"])
    Command(subcommand='fit', overrides=['seed=1'], options=['--trainer.max_steps', '10', \
'--print_config'])
    """
    given = list(arguments)
    subcommand = given.pop(0) if given and not given[0].startswith("-") else ""
    overrides: list[str] = []
    options: list[str] = []
    awaits_value = False
    for argument in given:
        if not awaits_value and _OVERRIDE.match(argument):
            overrides.append(argument)
        else:
            options.append(argument)
        is_option = argument.startswith("-") and not awaits_value
        awaits_value = is_option and "=" not in argument and argument not in _FLAGS
    return Command(subcommand, overrides, options)


@contextmanager
def hydra_job(configs: Path, command: Command) -> Iterator[DictConfig]:
    """The composed tree of a command, as ``hydra.main`` gives it to ``src/train.py``."""
    with initialize_config_dir(str(configs), version_base="1.3", job_name=NAME):
        cfg = compose("train", command.overrides, return_hydra_config=True)
    outside = HydraConfig.instance().cfg
    try:
        with read_write(cfg), open_dict(cfg):
            # Options tell runs apart as overrides do.
            cfg.hydra.overrides.task = [*cfg.hydra.overrides.task, *command.options]
        # Twice: the directory's own name asks Hydra what the overrides are.
        HydraConfig.instance().set_config(cfg)
        with read_write(cfg.hydra.runtime):
            cfg.hydra.runtime.output_dir = os.path.abspath(_folder(cfg, command))
        HydraConfig.instance().set_config(cfg)
        task = copy.deepcopy(cfg)
        with read_write(task), open_dict(task):
            del task["hydra"]
        yield task
    finally:
        HydraConfig.instance().cfg = outside


def _folder(cfg: DictConfig, command: Command) -> str:
    """The directory that the command works in: what only measures has that of ``eval.py``."""
    if command.subcommand == "fit":
        return str(cfg.hydra.run.dir)
    given = OmegaConf.to_container(cfg.hydra.overrides.task)
    assert isinstance(given, list)
    return run_directory(cfg.paths.log_dir, "eval", None, cfg.run_name, [str(o) for o in given])


def open_log() -> None:
    """Logs to the terminal and to the directory, as ``hydra.main`` does."""
    hydra: Any = HydraConfig.get()
    Path(hydra.runtime.output_dir).mkdir(parents=True, exist_ok=True)
    configure_log(hydra.job_logging, hydra.verbose)
