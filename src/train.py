"""Trains a policy: ``python src/train.py experiment=gdgrpo_spatial [key=value …]``."""

import os

# NumPy is left the small work of drawing and resizing: OpenBLAS's threads would cost ten times
# what they save. It reads this once, when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from reframe_vl.runs import check_start, register_resolvers
from reframe_vl.sweeps import objective

register_resolvers()


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Runs one training; in a sweep its number is what is searched for."""
    check_start(cfg, HydraConfig.get().overrides.task)
    # Imported here, so that a mistyped override is told at once and not after seconds of imports.
    from reframe_vl.training import train

    if cfg.config:
        from reframe_vl.lightning_cli import saved_config

        cfg = saved_config(Path(cfg.config), cfg)
    return objective(cfg, train(cfg))


if __name__ == "__main__":
    main()
