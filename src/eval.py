"""Evaluates a checkpoint: ``python src/eval.py ckpt=PATH [key=value …]``."""

import os

# NumPy is left the small work of drawing and resizing: OpenBLAS's threads would cost ten times
# what they save. It reads this once, when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hydra
from omegaconf import DictConfig

from reframe_vl.runs import register_resolvers

register_resolvers()


@hydra.main(version_base="1.3", config_path="../configs", config_name="eval")
def main(cfg: DictConfig) -> None:
    """Runs one evaluation."""
    # Imported here, so that a mistyped override is told at once and not after seconds of imports.
    from reframe_vl.evaluating import evaluate_checkpoint

    evaluate_checkpoint(cfg)


if __name__ == "__main__":
    main()
