"""The script that makes bases: a seed decides the checkpoint."""

import dataclasses
import functools
import importlib

import pytest
from transformers import Qwen3VLForConditionalGeneration

from reframe_vl.mini import base_measure
from reframe_vl.mini.base_training import STAGES, VISION

make_base = importlib.import_module("reframe_vl.mini.make_base")


@pytest.fixture
def short_stages(monkeypatch):
    vision = dataclasses.replace(VISION, steps=2, batch_size=8, frames=4, scenes=20, videos=4)
    stages = [dataclasses.replace(stage, steps=2, batch_size=8) for stage in STAGES]
    monkeypatch.setattr(make_base, "VISION", vision)
    monkeypatch.setattr(make_base, "STAGES", stages)
    monkeypatch.setattr(make_base, "measure", functools.partial(base_measure.measure, num_scenes=8))


@pytest.mark.usefixtures("short_stages")
def test_a_seed_decides_the_checkpoint(tmp_path):
    weights = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        figures = make_base.make_base(seed, folder)
        assert figures["seed"] == seed
        for world in ("image", "video"):
            assert 0 <= figures[world]["call_rate"] <= 1
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "0")


@pytest.mark.parametrize(
    "arguments", [[], ["seed=0"], ["out=x"], ["seed=0", "out=x", "more"], ["seed=one", "out=x"]]
)
def test_wrong_arguments_end_in_a_usage_line(arguments):
    with pytest.raises(SystemExit, match="Usage: python -m"):
        make_base.main(arguments)
