import dataclasses
from itertools import combinations

import pytest

from reframe_vl.data.media import MediaError
from reframe_vl.evaluation.pass_at_k import SampledAnswers, pass_curve, sample_answers
from reframe_vl.mini.model import base_folder
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.loading import load_policy
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.types import ImageMedia


def test_the_curve_is_the_share_of_draws_with_a_right_sample():
    right = {"a": 0, "b": 1, "c": 3, "d": 4}
    curve = pass_curve(SampledAnswers(right, 4, {name: name for name in right}, {}))
    assert list(curve) == ["1", "2", "4"]
    for k, entry in curve.items():
        shares = []
        for count in right.values():
            draws = list(combinations([True] * count + [False] * (4 - count), int(k)))
            shares.append(sum(map(any, draws)) / len(draws))
        assert entry["value"] == pytest.approx(sum(shares) / 4)
        assert entry["low"] <= entry["value"] <= entry["high"]


def test_without_items_there_is_no_curve():
    assert pass_curve(SampledAnswers({}, 4, {}, {})) == {}


class Broken(ImageMedia):
    key, size = "broken", (128, 128)

    def look(self, box, max_pixels):
        raise MediaError("gone")


def test_sampled_answers_are_counted_by_item_and_a_failure_leaves_its_item_out():
    policy = load_policy(base_folder(0), compact_calls=True)
    prompt = PromptSettings(show_tools=False, view_pixels=1024)
    settings = RolloutSettings(
        prompt, Budget(max_turns=2, tool_view_pixels=1024), max_new_tokens=16, max_concurrent=12
    )
    samples = [MiniWorld().sample("test", i) for i in range(4)]
    samples[2] = dataclasses.replace(samples[2], media=Broken())
    answers = sample_answers(policy, settings, [CropImage()], samples, 6)
    assert list(answers.right) == [samples[i].id for i in (0, 1, 3)]
    assert all(0 <= count <= 6 for count in answers.right.values())
    # A base is right about every other time: all alike would be greedy decoding.
    assert any(0 < count < 6 for count in answers.right.values())
    assert answers.left_out == {"failed": 1}
    assert sample_answers(policy, settings, [CropImage()], samples, 6) == answers
