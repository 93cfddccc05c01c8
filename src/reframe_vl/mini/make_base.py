"""Makes a base checkpoint: ``python -m reframe_vl.mini.make_base seed=0 out=FOLDER``.

The same seed gives the same checkpoint on the same machine and library versions.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reframe_vl.mini.base_measure import measure
from reframe_vl.mini.base_training import STAGES, VISION, train_stage
from reframe_vl.mini.lessons import LessonWriter
from reframe_vl.mini.model import build_model, save_checkpoint
from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.vision_training import train_vision
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import codec_for

logger = logging.getLogger(__name__)


def make_base(seed: int, folder: Path) -> dict[str, Any]:
    """Trains a base, writes its folder and returns its figures."""
    torch.manual_seed(seed)
    start = time.process_time()
    tokenizer = build_tokenizer()
    raw = build_model(tokenizer, seed)
    save_checkpoint(raw, tokenizer, folder)
    model = VisionLanguageModel(raw, ViewMaker.from_pretrained(folder))
    writer = LessonWriter(codec_for("qwen3_vl", compact=True), Encoder(tokenizer), model.view_maker)
    train_vision(model, VISION, np.random.default_rng([seed, 0]))
    for number, stage in enumerate(STAGES, 1):
        train_stage(model, writer, stage, np.random.default_rng([seed, number]))
    save_checkpoint(raw, tokenizer, folder)
    seconds = time.process_time() - start
    return {
        "seed": seed,
        "cpu_seconds": round(seconds),
        "image": dataclasses.asdict(measure(model, writer, MiniWorld())),
        "video": dataclasses.asdict(measure(model, writer, MiniVideoWorld())),
    }


def main(arguments: list[str]) -> None:
    """Reads ``seed=`` and ``out=`` and prints the base's figures as JSON."""
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    known = set(settings) == {"seed", "out"} and len(arguments) == 2
    if not known or not settings["seed"].isdecimal():
        raise SystemExit("Usage: python -m reframe_vl.mini.make_base seed=INTEGER out=FOLDER")
    # More threads add in another order, which gives another checkpoint.
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    print(json.dumps(make_base(int(settings["seed"]), Path(settings["out"])), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
