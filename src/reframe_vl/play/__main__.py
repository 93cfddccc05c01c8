"""Plays an episode by hand: ``python -m reframe_vl.play [--data NAME] [key=value …]``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from reframe_vl.data.media import MediaError
from reframe_vl.play.game import Game, finish, make_game
from reframe_vl.play.screen import Screen
from reframe_vl.play.typed import HELP, TypedEngine
from reframe_vl.runs import register_resolvers
from reframe_vl.tools.base import close_tools

_ERRORS = (OSError, ValueError, LookupError, MediaError, HydraException, OmegaConfBaseException)
_CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def main(argv: Sequence[str] | None = None) -> None:
    """Plays one episode.

    Raises:
        SystemExit: It cannot be played as configured.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    console = Console(highlight=False)
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="reframe_play_"))
    try:
        game = make_game(
            _config(args), args.items, args.number, drop=args.drop, threshold=args.gate
        )
        screen = Screen(console, game.encoder.tokenizer, out, not args.no_draw)
        _introduce(screen, game)
        engine = TypedEngine(game.encoder, game.codec, screen, input)
        rollout = asyncio.run(game.episode.run(engine, "play"))
        finish(console, game, rollout, args.progress, out / "rollouts")
    except EOFError:
        screen.say("The game ends here, without a reward.")
    except KeyboardInterrupt:
        sys.exit("The game was broken off, without a reward.")
    except _ERRORS as error:
        sys.exit(f"{error}")
    finally:
        if "game" in locals():
            close_tools(game.tools)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reframe_vl.play",
        description="Plays one episode in the place of the model.",
        epilog=f"In the game:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="as for training: key=value")
    parser.add_argument("--data", help="mini_image, mini_video, records, …: data=NAME for short")
    parser.add_argument(
        "--items",
        choices=("train", "evaluation", "conflict"),
        default="evaluation",
        help="which samples (default: evaluation)",
    )
    parser.add_argument("--number", type=int, default=0, help="which of them (default: 0)")
    parser.add_argument(
        "--drop", action="store_true", help="drop the original after the first successful call"
    )
    parser.add_argument(
        "--gate", type=float, metavar="IOU", help="replace calls that meet the evidence less"
    )
    parser.add_argument(
        "--progress",
        type=float,
        default=0.0,
        help="of training, in [0, 1], which the weight of R_call depends on (default: 0)",
    )
    parser.add_argument("--out", type=Path, help="takes images and the record of the rollout")
    parser.add_argument("--no-draw", action="store_true", help="no images in the terminal")
    parser.add_argument("--configs", type=Path, default=_CONFIGS, help="the folder of configs")
    return parser


def _config(args: argparse.Namespace) -> DictConfig:
    if not (args.configs / "train.yaml").is_file():
        raise FileNotFoundError(
            f"No train.yaml in {args.configs}: name the configs of a clone with --configs FOLDER."
        )
    if not 0 <= args.progress <= 1:
        raise ValueError(f"--progress is {args.progress}: it must lie in [0, 1].")
    register_resolvers()
    overrides = [*args.overrides, *([f"data={args.data}"] if args.data else [])]
    with initialize_config_dir(str(args.configs.resolve()), version_base="1.3"):
        return compose("train", overrides)


def _introduce(screen: Screen, game: Game) -> None:
    sample = game.episode.sample
    screen.say(f"Sample {sample.id}. Coordinates: {game.codec.frame}, x first.\n{HELP}")


if __name__ == "__main__":
    main()
