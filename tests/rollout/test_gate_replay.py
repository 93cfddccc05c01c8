"""Rollouts that the gate repaired: the trainer's log-probs are the sampler's, also afterwards."""

import pytest
import torch

from reframe_vl.mini.model import base_folder
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.loading import load_policy
from reframe_vl.policy.score import score
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.gate import Gate
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings, make_environment
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import CallStatus, Provenance


@pytest.fixture(scope="module")
def played():
    policy = load_policy(base_folder(0))
    prompts = PromptSettings(show_tools=False, view_pixels=1024, frame_pixels=256)
    settings = RolloutSettings(prompts, Budget(tool_view_pixels=1024), max_new_tokens=16)
    collector = Collector(
        HFEngine(policy.model),
        make_environment(policy, [CropImage(), SelectFrames()], settings.budget),
        settings.prompt,
        EventLoopThread(),
    )
    sampling = settings.sampling(policy)
    worlds = [MiniWorld(), MiniVideoWorld()]
    samples = [world.sample("test", index) for index in range(8) for world in worlds]
    # Nearly every call gives way, and every other rollout loses its original input.
    plan = Plan(0, 8, sampling, drop_probability=0.5, gate=Gate(threshold=0.9, probability=0.7))
    groups = collector.collect(samples, plan)
    collector.loop.stop()
    return policy.model, sampling, [r for group in groups for r in group.rollouts]


def test_sampled_tokens_of_repaired_rollouts_replay_exactly(played):
    model, sampling, rollouts = played
    repaired = [r for r in rollouts if any(c.status is CallStatus.REPLACED for c in r.calls)]
    contexts = [context for rollout in rollouts for context in rollout.contexts]
    with model.inference():
        scores = score(model, contexts, sampling)
    before, after, expected_before, expected_after = [], [], [], []
    for context, logprobs_T in zip(contexts, scores.per_context(), strict=True):
        start, injected = 0, False
        for span in context.spans:
            injected |= span.provenance is Provenance.INJECTED
            if not span.trained:
                continue
            found = logprobs_T[start : start + len(span.token_ids)]
            start += len(span.token_ids)
            if span.provenance is Provenance.SAMPLED:
                (after if injected else before).append(found)
                (expected_after if injected else expected_before).extend(span.logprobs)
    assert len(repaired) > 20
    assert any(rollout.dropped for rollout in repaired)
    assert expected_before
    assert len(expected_after) > 50
    for found, expected in ((before, expected_before), (after, expected_after)):
        torch.testing.assert_close(torch.cat(found), torch.tensor(expected), atol=1e-4, rtol=0)
