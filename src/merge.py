"""Merges checkpoints of one base into one model.

python src/merge.py method=ties base=DIR checkpoints=[A,B] weights=[0.5,0.5] output=DIR
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from reframe_vl.runs import ConfigError, readable_errors, register_resolvers

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
        merge(cfg)


def merge(cfg: DictConfig) -> None:
    """Opens what the config names, and writes the merge."""
    # Imported here, so that a mistyped override is told at once and not after seconds of imports.
    from reframe_vl.checkpoint.folder import local_folder
    from reframe_vl.checkpoint.merge import MergeSettings, merge_checkpoints
    from reframe_vl.mini.model import base_folder

    given: Any = OmegaConf.to_container(cfg)
    names = ("method", "weights", "density", "seed", "dtype")
    settings = MergeSettings(**{name: given[name] for name in names})
    base = base_folder(cfg.base) if isinstance(cfg.base, int) else local_folder(str(cfg.base))
    output = Path(cfg.output)
    with ExitStack() as stack:
        checkpoints = [_folder(Path(path), output.parent, stack) for path in given["checkpoints"]]
        merge_checkpoints(base, checkpoints, output, settings)


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
    from reframe_vl.checkpoint.adapter import ADAPTER_CONFIG
    from reframe_vl.checkpoint.export import export_policy
    from reframe_vl.training import load_checkpoint

    if (path / runs.POLICY / "config.json").is_file():
        return path / runs.POLICY
    if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return path
    run = path.parent.parent if path.is_file() else path
    if not (run / "config.yaml").is_file():
        raise FileNotFoundError(
            f"No checkpoint at {path}: give a run directory, one of its .ckpt files, or a folder "
            "with config.json or adapter_config.json."
        )
    # A .ckpt file holds what was trained alone: the run's settings tell the rest of the model.
    cfg = OmegaConf.load(run / "config.yaml")
    assert isinstance(cfg, DictConfig)
    # Adapters are merged into the weights here: in float32, since the merge casts last.
    cfg.model.dtype = "float32"
    policy = load_checkpoint(cfg, path)
    room.mkdir(parents=True, exist_ok=True)
    aside = stack.enter_context(tempfile.TemporaryDirectory(dir=room, prefix=".merge_"))
    folder = Path(aside) / runs.POLICY
    export_policy(policy, folder)
    return folder


if __name__ == "__main__":
    main()
