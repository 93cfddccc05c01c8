"""Training steps on real receipts: real sizes, boxes and text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from reframe_vl.data.records import write_records
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES
from reframe_vl.policy.score import score
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train
from tiny import tiny_model, tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
MAX_PIXELS = 256 * 1024


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model that takes views of up to 512x512 pixels."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3_vl")
    model.base.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    settings = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings["size"] = {"shortest_edge": 4096, "longest_edge": MAX_PIXELS}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    return folder


@pytest.fixture(scope="module")
def receipts(shared_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    shutil.copytree(shared_data / "images" / "sroie", folder / "images")
    source = SOURCES["visual_cot_sroie"](
        shared_data / "annotations" / "visual_cot_sroie.jsonl", folder / "images"
    )
    write_records(folder / "receipts.jsonl", source.records(Report(strict=False)))
    return folder / "receipts.jsonl"


def test_two_training_steps_on_real_receipts(receipts, model_folder, tmp_path):
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose(
            "train",
            [
                "data=records",
                f"data.path={receipts}",
                f"model.path={model_folder}",
                f"paths.run_dir={tmp_path}",
                "steps=2",
                "prompts_per_step=3",
                "rollouts_per_prompt=2",
                f"limits.view_pixels={MAX_PIXELS // 4}",
                f"limits.tool_view_pixels={MAX_PIXELS}",
                "limits.max_context_tokens=4096",
                "limits.max_visual_tokens=2048",
                "evaluation.every=0",
                "evaluate=false",
            ],
        )
    train(cfg)
    model = tiny_model("qwen3_vl")
    model = type(model)(model.model, replace(model.view_maker, max_pixels=MAX_PIXELS))
    groups = RolloutStore(tmp_path / "rollouts").read(0)
    contexts = [c for g in groups for r in g.rollouts for c in r.contexts]
    # A receipt is a tall page; its view keeps the shape and fills the budget.
    for context in contexts:
        _, height, width = context.views[0].grid_thw
        assert height > width
        assert 0.6 < height * width * 64 / (MAX_PIXELS // 4) <= 1
    scores = score(model.eval(), contexts, groups[0].rollouts[0].sampling)
    sampled = [x for c in contexts for s in c.spans if s.trained for x in s.logprobs]
    with torch.no_grad():
        np.testing.assert_allclose(scores.logprobs_T.numpy(), sampled, atol=1e-4)
