"""Lightning's CLI over the Hydra tree: its options, types and subcommands, and the same training.

The tree is composed, put into the form of Lightning's CLI and read by its parser, which checks all
types before anything is made; options and ``--config`` files then change single values. What runs
is what ``src/train.py`` runs: run directories, resuming, export and the final table are shared.
"""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from omegaconf import DictConfig, OmegaConf

from reframe_vl import evaluating, runs, slurm, training
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.command import Command, open_log
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.lightning_config import (
    OF_THE_COMMAND,
    RUN_DIR,
    Tree,
    names_of,
    patched,
    placed,
    to_hydra,
    to_lightning,
    without_default_callables,
    without_defaults,
)
from reframe_vl.policy.loading import Policy
from reframe_vl.policy.teachers import Teachers

# Dataclasses that functions make, or that have subclasses.
set_parsing_settings(subclasses_enabled=[Policy, Teachers])


WHOLE = {"trainer", "model", "data", "run"}
"""What a config of this command has that was not written by hand to change some values."""


class TrainingCLI(LightningCLI):
    """Runs ``fit``, ``validate`` or ``test`` as it is made.

    Args:
        command: What was given.
        cfg: The composed tree.
        stack: Ends what the run holds.
    """

    def __init__(self, command: Command, cfg: DictConfig, stack: ExitStack) -> None:
        """Parses, and runs."""
        self.command, self.stack = command, stack
        self.run_dir = str(cfg.paths.run_dir)
        self.tree = resolved(cfg)
        super().__init__(
            PolicyModule,
            SampleDataModule,
            # The run directory has the config already.
            save_config_callback=None,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommands, and which of the trainer's arguments are no options of theirs."""
        made = {"model", "datamodule"}
        return {
            # A run goes on by ``resume``, which names its directory too.
            "fit": made | {"train_dataloaders", "val_dataloaders", "ckpt_path", "weights_only"},
            "validate": made | {"dataloaders", "verbose", "weights_only"},
            "test": made | {"dataloaders", "verbose", "weights_only"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the rest of the tree."""
        add_rest(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Reads the tree, and over it the options; then puts what these changed into the tree."""
        name, options = self.command.subcommand, [*self._options()]
        if name not in self.subcommands():
            # It has words for this.
            parser.parse_args([name, *options] if name else options)
            raise SystemExit(2)
        composed = [name, "--config", yaml.safe_dump(to_lightning(self.tree), sort_keys=False)]
        self.config = parser.parse_args([*composed, *options])
        if options:
            names = names_of(self.tree)
            before, after = (
                to_hydra(config[name].as_dict(), names)
                for config in (parser.parse_args(composed), self.config)
            )
            self.tree = patched(self.tree, before, after)

    def before_instantiate_classes(self) -> None:
        """Takes the run's directory, before a model is loaded."""
        cfg: Any = OmegaConf.create(placed(self.tree, RUN_DIR, self.run_dir))
        self.cfg: DictConfig = cfg
        open_log()
        config = self.config[self.command.subcommand]
        if self.command.subcommand == "fit":
            self.run = self.stack.enter_context(training.open_run(cfg))
            if self.run.finished is not None:
                evaluating.show(self.run.finished)
                raise SystemExit(0)
            for logger in config.trainer.logger or []:
                logger["dict_kwargs"] = training.purged(self.run.checkpoint)
        else:
            runs.check(cfg)
        with runs.readable_errors():
            training.prepare(cfg)
        _place(config, self.run_dir)

    def instantiate_classes(self) -> None:
        """Makes all parts; what goes wrong is told in a sentence."""
        with runs.readable_errors():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Makes the trainer, with our way to end a SLURM job."""
        own = self._get(self.config_init, "trainer").get("plugins") or []
        plugins = [*(own if isinstance(own, list) else [own]), *slurm.plugins()] or None
        return super().instantiate_trainer(**kwargs, plugins=plugins)

    def after_instantiate_classes(self) -> None:
        """Records what the run is."""
        if self.command.subcommand == "fit":
            with runs.readable_errors():
                training.start(self.cfg, self.run, self.trainer, self.model, self.datamodule)

    # ------------------------------------------------------------------ subcommands

    def fit(self, model: PolicyModule, datamodule: SampleDataModule) -> None:
        """Trains as ``src/train.py`` does, to the final table."""
        training.fit(self.cfg, self.run, self.trainer, model, datamodule)

    def validate(
        self, model: PolicyModule, datamodule: SampleDataModule, ckpt_path: Any = None
    ) -> None:
        """Measures what the learning curve shows: its items and arms."""
        self.cfg.evaluation.arms = self.cfg.evaluation.curve_arms
        self._measure(model, ckpt_path, self.cfg.evaluation["items"])

    def test(
        self, model: PolicyModule, datamodule: SampleDataModule, ckpt_path: Any = None
    ) -> None:
        """Measures what a run ends with."""
        self._measure(model, ckpt_path, None)

    def _measure(self, model: PolicyModule, checkpoint: Any, items: int | None) -> None:
        policy, base = model.components, None
        # As it was loaded: the module has widened what it would train.
        policy.model.narrow()
        if checkpoint is not None:
            with runs.readable_errors():
                policy = evaluating.load_checkpoint(self.cfg, Path(checkpoint))
            base = model.components if self.cfg.evaluation.base else None
        folder = Path(self.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        evaluating.evaluate(self.cfg, policy, base, folder / runs.RESULTS, items)

    def _options(self) -> Sequence[str]:
        """The options, with what is in config files in their place, in Lightning's form."""
        options = list(self.command.options)
        for index, option in enumerate(options):
            name, equals, value = option.partition("=")
            if name not in ("-c", "--config"):
                continue
            at = index if equals else index + 1
            path = Path(value if equals else (options[at] if at < len(options) else ""))
            if path.is_file():
                node = read_yaml(path)
                hydras = "algorithm" in node
                if hydras or node.keys() >= WHOLE:
                    runs.check_beside(path, self.command.overrides)
                read = to_lightning(_without_place(node)) if hydras else node
                text = yaml.safe_dump(without_default_callables(read), sort_keys=False)
                options[at] = f"{name}={text}" if equals else text
        return options


def add_rest(parser: LightningArgumentParser) -> None:
    """Adds the part of the tree that Lightning has no place for."""
    parser.add_argument(
        "--run",
        # Not of any types: texts of settings would be read as YAML.
        type=dict,
        default={},
        help="All other settings of the tree: what the final table, the log and checks read. "
        "Values of trainer, model and data are not taken from here.",
    )


def _place(node: Any, run_dir: str) -> None:
    """Puts the run's directory into all texts of a parsed config."""
    items = vars(node).items() if isinstance(node, Namespace) else ()
    if isinstance(node, dict):
        items = node.items()
    for name, value in list(items):
        if isinstance(value, str):
            node[name] = value.replace(RUN_DIR, run_dir)
        for part in value if isinstance(value, list) else (value,):
            _place(part, run_dir)


# ------------------------------------------------------------------ trees


def resolved(cfg: DictConfig) -> Tree:
    """A composed tree with all values in place, the run's directory alone left open.

    Raises:
        ConfigError: Something cannot be resolved.
    """
    if cfg.config:
        return saved_tree(Path(cfg.config), cfg)
    with runs.readable_errors():
        run_dir = str(cfg.paths.run_dir)
        tree: Any = OmegaConf.to_container(cfg, resolve=True)
    return {**placed(tree, run_dir, RUN_DIR), "paths": tree["paths"]}


def saved_config(path: Path, cfg: DictConfig) -> DictConfig:
    """A saved config as ``src/train.py`` runs it, in this command's directory."""
    saved: Any = OmegaConf.create(placed(saved_tree(path, cfg), RUN_DIR, str(cfg.paths.run_dir)))
    return saved


def saved_tree(path: Path, cfg: DictConfig) -> Tree:
    """The tree of a saved config; where the run lives is said by this command.

    Args:
        path: What a run has as ``config.yaml``, or what ``--print_config`` printed.
        cfg: The tree of the command.

    Raises:
        ConfigError: It is no such file.
    """
    node = read_yaml(path)
    if "algorithm" in node:
        tree = _without_place(node)
    elif node.keys() >= WHOLE:
        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_argument("--seed_everything", type=int)
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.add_lightning_class_args(PolicyModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(SampleDataModule, "data", subclass_mode=True)
        add_rest(parser)
        try:
            parsed = parser.parse_object(without_default_callables(node))
        except (ArgumentError, ImportError, ValueError) as error:
            raise runs.ConfigError(f"The config {path} cannot be run: {error}") from error
        full = to_hydra(parsed.as_dict(), {})
        # The trainer's are read as settings of the run.
        tree = {n: v if n == "trainer" else without_defaults(v) for n, v in full.items()}
    else:
        raise runs.ConfigError(
            f"config={path} is neither a run's config.yaml nor what src/cli.py prints with "
            "--print_config."
        )
    own: Any = OmegaConf.to_container(cfg, resolve=True)
    return tree | {name: own[name] for name in OF_THE_COMMAND}


def read_yaml(path: Path) -> Tree:
    """A file of settings.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        node = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise runs.ConfigError(f"The config {path} cannot be read: {error}") from None
    if not isinstance(node, dict):
        raise runs.ConfigError(f"The config {path} holds no settings by name.")
    return node


def _without_place(node: Mapping[str, Any]) -> Tree:
    """The tree of another run, without where that one lived."""
    tree: Tree = placed(dict(node), str(node["paths"]["run_dir"]), RUN_DIR)
    return tree


def main(command: Command, cfg: DictConfig) -> None:
    """Runs a command."""
    runs.check_start(cfg, command.overrides)
    with ExitStack() as stack:
        TrainingCLI(command, cfg, stack)
