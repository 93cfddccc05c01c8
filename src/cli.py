"""Lightning's CLI over the same settings: ``python src/cli.py fit experiment=NAME [key=value …]``.

Hydra's overrides compose the tree, Lightning's options change single values of it:

    python src/cli.py fit experiment=gdgrpo_spatial --trainer.max_steps=10
    python src/cli.py fit experiment=gdgrpo_spatial --print_config > run.yaml
    python src/cli.py test experiment=gdgrpo_spatial --ckpt_path=logs/gdgrpo_spatial/RUN
"""

import os
import sys
from pathlib import Path

# NumPy is left the small work of drawing and resizing: OpenBLAS's threads would cost ten times
# what they save. It reads this once, when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Lightning calls a function whose new name jsonargparse would tell of in each run.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from hydra.errors import CompactHydraException

from reframe_vl import slurm
from reframe_vl.command import hydra_job, split
from reframe_vl.runs import register_resolvers

register_resolvers()


def main() -> None:
    """Runs one command."""
    command = split(sys.argv[1:])
    configs = Path(__file__).parents[1] / "configs"
    try:
        # The imports take seconds, in which a job may have to give way too.
        with slurm.requeued_on_signal(), hydra_job(configs, command) as cfg:
            # Imported here, so that a mistyped override is told at once and not after seconds of
            # imports.
            from reframe_vl.lightning_cli import main as run

            run(command, cfg)
    except CompactHydraException as error:
        print(error, *([error.__cause__] if error.__cause__ else []), sep="\n", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
