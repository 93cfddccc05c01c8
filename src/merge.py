"""Merges checkpoints of one base into one model, or writes one checkpoint as a model's folder.

python src/merge.py method=ties base=DIR checkpoints=[A,B] output=DIR
python src/merge.py method=consolidate checkpoints=[RUN/checkpoints/step_000099.ckpt] output=DIR
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import yaml
from omegaconf import DictConfig, OmegaConf

from reframe_vl.runs import ConfigError, readable_errors, register_resolvers

logger = logging.getLogger(__name__)

register_resolvers()


@hydra.main(version_base="1.3", config_path="../configs", config_name="merge")
def main(cfg: DictConfig) -> None:
    """Runs one merge."""
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(
            f"Not given: {', '.join(missing)}. Add {' '.join(f'{key}=…' for key in missing)} to "
            "the command; configs/merge.yaml says what each is."
        )
    with readable_errors():
        if cfg.method == "consolidate":
            consolidate(cfg)
        else:
            merge(cfg)


def consolidate(cfg: DictConfig) -> None:
    """Writes a run's checkpoint, whatever strategy made it, as transformers and vLLM load it.

    Raises:
        FileExistsError: The output is not empty.
        FileNotFoundError: There is no such checkpoint.
        ValueError: More than one was named, it is a model's folder already, it is not finite,
            or a setting cannot be used.
    """
    import torch

    from reframe_vl.checkpoint.card import model_card
    from reframe_vl.checkpoint.export import export_policy
    from reframe_vl.checkpoint.folder import ADAPTER_CONFIG
    from reframe_vl.checkpoint.merge import MergeSettings
    from reframe_vl.checkpoint.reading import read_progress
    from reframe_vl.evaluating import load_checkpoint
    from reframe_vl.runs import latest_checkpoint

    checkpoints, output = _checkpoints(cfg), _output(cfg)
    if len(checkpoints) != 1:
        raise ValueError(
            f"method=consolidate writes one checkpoint, and {len(checkpoints)} are named: give "
            "one, or another method to merge them."
        )
    if cfg.adapter not in ("merged", "separate"):
        raise ValueError(f"adapter={cfg.adapter} is unknown: choose merged or separate.")
    # It knows which types there are.
    MergeSettings(dtype=cfg.dtype)
    path = checkpoints[0]
    if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ValueError(
            f"{path} is a folder that transformers and vLLM load already: take it as it is. To "
            "merge an adapter into its base, or for another dtype, give base=… and method=linear."
        )
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise FileExistsError(f"{output} is not empty: give a new folder for the model.")
    settings = _settings_of(path)
    checkpoint = latest_checkpoint(path) or path
    dtype = cfg.dtype or settings.model.get("dtype") or "float32"
    # Adapters are merged in, and types changed, in single precision, and rounded once.
    wide = settings.model.get("lora") or dtype != settings.model.get("dtype")
    policy = load_checkpoint(_in_single(settings) if wide else settings, checkpoint)
    progress = read_progress(checkpoint)
    card = model_card(
        str(settings.model.path),
        OmegaConf.to_yaml(settings, resolve=True),
        progress["epoch"] + 1,
        _measured(_run_of(path), progress["epoch"] + 1),
    )
    export_policy(policy, output, card, adapter=cfg.adapter, dtype=getattr(torch, dtype))


def merge(cfg: DictConfig) -> None:
    """Opens what the config names, and writes the merge."""
    # Imported here, so that a mistyped override is told at once and not after seconds of imports.
    from reframe_vl.checkpoint.merge import MergeSettings, merge_checkpoints

    given: Any = OmegaConf.to_container(cfg)
    names = ("method", "weights", "density", "seed", "dtype")
    settings = MergeSettings(**{name: given[name] for name in names})
    output, paths = _output(cfg), _checkpoints(cfg)
    base = _base(cfg, paths)
    with ExitStack() as stack:
        checkpoints = [_folder(path, output.parent, stack) for path in paths]
        # Some of the folders are gone afterwards.
        given_as = [str(path.absolute()) for path in paths]
        merge_checkpoints(base, checkpoints, output, settings, recorded_as=given_as)


def _base(cfg: DictConfig, checkpoints: list[Path]) -> Path:
    """The folder of the base: the one that is given, or what the checkpoints' runs began with.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is no base, or none is given and the runs name none or several.
    """
    from reframe_vl.mini.model import base_folder
    from reframe_vl.policy.hub import local_folder
    from reframe_vl.policy.kinship import same_model

    given = cfg.base
    if isinstance(given, bool) or not isinstance(given, int | str | None):
        raise ValueError(
            f"base={given}: give a folder, a name on the model hub, or the number of a shipped "
            "base; null takes what the checkpoints' runs were trained from."
        )
    began = [(path, start) for path in checkpoints if (start := _trained_from(path)) is not None]
    if given is not None:
        base = base_folder(given) if isinstance(given, int) else local_folder(given)
        for path, start in began:
            # A run may go on from another one's policy, and both be merged against the first base.
            if not same_model(start, base):
                logger.warning(
                    "%s was trained from %s, and is merged as a checkpoint of %s, which is given "
                    "as base.",
                    *(path, start, base),
                )
        return base
    if not began:
        raise ValueError(
            "No checkpoint lies in a run that tells what it was trained from: add base=… to the "
            "command, a folder, a name on the model hub, or the number of a shipped base."
        )
    first, start = began[0]
    for path, other in began[1:]:
        if not same_model(start, other):
            raise ValueError(
                f"{first} was trained from {start}, and {path} from {other}: checkpoints of one "
                "base can be merged. If both go back to one, add base=… to the command."
            )
    try:
        return local_folder(start)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error} {first} was trained from it: add base=… with the place where it is now."
        ) from error


def _trained_from(path: Path) -> str | None:
    """The folder or name of the model that a checkpoint's run began with; None outside of runs.

    Raises:
        ValueError: The run's settings cannot be read.
    """
    if not (_run_of(path) / "config.yaml").is_file():
        return None
    start = OmegaConf.select(_settings_of(path), "model.path")
    return None if start is None else str(start)


def _checkpoints(cfg: DictConfig) -> list[Path]:
    """The paths that are given; one of them needs no list.

    Raises:
        ValueError: They are no paths.
    """
    settings: Any = OmegaConf.to_container(cfg)
    given = settings["checkpoints"]
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(
            f"checkpoints={given}: give a list of paths, as in checkpoints=[RUN,FOLDER]; a folder "
            "whose name is a number is ./NUMBER."
        )
    return [Path(path) for path in paths]


def _output(cfg: DictConfig) -> Path:
    """The folder to write.

    Raises:
        ValueError: It is no path.
    """
    if not isinstance(cfg.output, str):
        raise ValueError(f"output={cfg.output}: give the path of the folder to write.")
    # As it is written: what is needed for a while goes beside it, on the same disk.
    return Path(cfg.output).resolve()


def _folder(path: Path, room: Path, stack: ExitStack) -> Path:
    """The folder of a checkpoint's weights: its own, its run's, or one made of a ``.ckpt`` file.

    Args:
        path: As given.
        room: Where a folder may be made.
        stack: Removes it again.

    Raises:
        FileNotFoundError: There is no checkpoint at the path.
    """
    from reframe_vl import runs
    from reframe_vl.checkpoint.export import export_policy
    from reframe_vl.checkpoint.folder import ADAPTER_CONFIG
    from reframe_vl.checkpoint.writing import aside
    from reframe_vl.evaluating import load_checkpoint

    policy = path / runs.POLICY
    if (policy / "config.json").is_file():
        newest, written = runs.latest_checkpoint(path), (policy / "config.json").stat().st_mtime
        if newest is not None and newest.stat().st_mtime > written:
            logger.warning(
                "%s is newer than %s, which is merged: give the checkpoint itself to merge it.",
                *(newest, policy),
            )
        return policy
    if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return path
    loaded = load_checkpoint(_in_single(_settings_of(path)), path)
    folder = stack.enter_context(aside(room)) / runs.POLICY
    export_policy(loaded, folder)
    return folder


def _settings_of(path: Path) -> DictConfig:
    """The settings of a checkpoint's run: it holds what was trained alone, they tell the rest.

    Raises:
        FileNotFoundError: The path is no run's, nor its checkpoint's.
        ValueError: The run's settings cannot be read.
    """
    file = _run_of(path) / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(
            f"No checkpoint at {path}: give a run directory, one of its checkpoints, or a folder "
            "with config.json or adapter_config.json."
        )
    try:
        cfg = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(cfg, DictConfig) or "model" not in cfg:
        raise ValueError(f"{file} is no run's: it does not say what its model is.")
    return cfg


def _in_single(settings: DictConfig) -> DictConfig:
    """A run's settings, to load its model in float32: adapters are merged in, then it is cast."""
    single = settings.copy()
    single.model.dtype = "float32"
    return single


def _run_of(path: Path) -> Path:
    """The run that a path is, or lies in: what a run writes stands beside its settings."""
    from reframe_vl import runs

    written = (runs.CHECKPOINTS, runs.POLICY)
    for place in (path, *path.absolute().parents[:2]):
        if (place / "config.yaml").is_file() and any((place / name).is_dir() for name in written):
            return place
    return path


def _measured(run: Path, steps: int) -> dict[str, float]:
    """The learning curve's numbers after so many steps, or the last ones before."""
    curve = run / "curve.jsonl"
    lines = curve.read_text().splitlines() if curve.is_file() else []
    known = [point for point in map(json.loads, lines) if point["step"] <= steps]
    last = known[-1] if known else {}
    return {f"val/{name}": value for name, value in last.items() if name != "step"}


if __name__ == "__main__":
    main()
