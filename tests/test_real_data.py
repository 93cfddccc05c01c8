"""Training steps on real receipts and a real video: real sizes, boxes, windows and text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from reframe_vl.data.records import AnswerInfo, read_records, write_records
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES
from reframe_vl.data.stages.finalise import expand_evidence
from reframe_vl.data.video import GridRule
from reframe_vl.data.video_records import video_record
from reframe_vl.policy.score import score
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train
from reframe_vl.types import CallStatus, Provenance
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
    write_records(
        folder / "receipts.jsonl", map(expand_evidence, source.records(Report(strict=False)))
    )
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


# --------------------------------------------------------------------------- a real video

QUESTION = "From when to when: {}"
ANSWER = "{:g} to {:g} seconds"


@pytest.fixture(scope="module")
def windows(shared_data, tmp_path_factory):
    """Records of a Charades video and its two annotated windows, on a grid of 8 frames."""
    folder = tmp_path_factory.mktemp("video")
    shutil.copy(shared_data / "videos" / "univtg_charades.mp4", folder / "Y1HGC.mp4")
    annotation = shared_data / "annotations" / "pair_charades_sta_Y1HGC.jsonl"
    records = []
    for row in map(json.loads, annotation.read_text().splitlines()):
        (window,) = row["relevant_windows"]
        records.append(
            video_record(
                folder / "Y1HGC.mp4",
                [tuple(window)],
                GridRule(fps=2, max_frames=8),
                max_frames=4,
                id=f"charades/{row['qid']}",
                source="charades_sta",
                split="train",
                licence="Charades: non-commercial",
                raw=row,
                question=QUESTION.format(row["query"]),
                answer=AnswerInfo(kind="span", value=ANSWER.format(*window)),
            )
        )
    write_records(folder / "windows.jsonl", records)
    return folder / "windows.jsonl"


def test_real_windows_become_the_frames_shown_in_them(windows):
    for record in read_records(windows):
        (start, end), times = record.segments[0], record.media.timestamps_s
        (frames,) = record.evidence.segments
        inside = [i for i, time in enumerate(times) if start <= time < end]
        assert frames == tuple(range(max(inside[0] - 1, 0), inside[-1] + 2))
        assert record.media.duration_s == pytest.approx(record.raw["duration"], abs=0.1)


def selects_then_answers(records):
    """What an engine says: each sample's canonical call, then the right answer or another."""
    tok = tokenizer()

    async def generate(self, session, context, sampling, seed):
        turn = sum(span.provenance is Provenance.SAMPLED for span in context.spans)
        (record,) = (r for r in records if f"/{r.id}" in session)
        frames = json.dumps(record.evidence.segments[0], separators=(",", ":"))
        call = f'<tool_call>{{"name":"SelectFrames","arguments":{{"frames":{frames}}}}}</tool_call>'
        answer = f"<answer>{record.answer.value if seed // 2 % 2 else 'never'}</answer>"
        ids = tok(f"{answer if turn else call}<|im_end|>", add_special_tokens=False)["input_ids"]
        return Generation(tuple(ids), (None,) * len(ids), "stop")

    return generate


def test_two_training_steps_on_a_real_video(windows, tmp_path, monkeypatch):
    records = read_records(windows)
    monkeypatch.setattr(HFEngine, "generate", selects_then_answers(records))
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose(
            "train",
            [
                "data=records",
                f"data.path={windows}",
                f"paths.run_dir={tmp_path}",
                "steps=2",
                "prompts_per_step=2",
                "rollouts_per_prompt=4",
                "limits.max_context_tokens=512",
                "limits.frame_pixels=256",
                "limits.tool_view_pixels=1024",
                "evaluation.every=0",
                "evaluate=false",
            ],
        )
    train(cfg)
    by_id = {record.id: record for record in records}
    for step in (0, 1):
        groups = RolloutStore(tmp_path / "rollouts").read(step)
        assert {group.sample.id for group in groups} == by_id.keys()
        for group in groups:
            record = by_id[group.sample.id]
            for rollout in group.rollouts:
                (call,) = rollout.calls
                assert (call.status, call.frames) == (CallStatus.OK, record.evidence.segments[0])
                assert rollout.rewards["grounding"] == 1
                prompt, last = rollout.contexts[0].spans[0], rollout.contexts[-1]
                # A wide frame within 256 pixels, in whole patches of 8.
                assert [view.pixels.shape for view in prompt.views] == [(8, 16, 3)] * 8
                assert len(last.views) == (0 if rollout.dropped else 8) + len(call.frames)
                assert len({view.hash for view in prompt.views}) == 8
            assert len({rollout.reward for rollout in group.rollouts}) > 1
