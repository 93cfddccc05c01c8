import pytest
from omegaconf import OmegaConf

import grey_world
from reframe_vl.evaluation.outcomes import Arm, named_arms
from reframe_vl.evaluation.policy import evaluate_policy
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.settings import RolloutSettings
from tiny import tiny_model, tokenizer


def test_no_names_stand_for_all_arms():
    assert named_arms(None) == tuple(Arm)


def test_arms_are_named_as_yaml_reads_them_and_each_counts_once():
    names = OmegaConf.create("[tools, true, no_tools, tools]")
    assert names[1] is True
    assert named_arms(names) == (Arm.TOOLS, Arm.TRUE, Arm.NO_TOOLS)
    assert named_arms(["true", Arm.BLANK]) == (Arm.TRUE, Arm.BLANK)


WRONG = [
    ("tools", "a list such as"),
    (["tool"], "no arm 'tool'"),
    ([False], "no arm False"),
    ([], "empty"),
    (["no_tools_matched"], "needs the arm tools"),
]


@pytest.mark.parametrize(("names", "words"), WRONG)
def test_names_that_are_no_arms_are_refused_and_the_valid_ones_listed(names, words):
    with pytest.raises(ValueError, match=words) as refused:
        named_arms(names)
    if names != ["no_tools_matched"]:
        assert all(arm in str(refused.value) for arm in Arm)


def test_a_policy_is_evaluated_in_the_arms_that_were_named():
    policy = Policy(tiny_model("qwen3_vl"), tokenizer(), grey_world.CODEC, "tiny")
    samples = [grey_world.image_sample("s")]
    settings = RolloutSettings(max_new_tokens=2)
    result = evaluate_policy(policy, settings, [], samples, arms=OmegaConf.create(["no_tools"]))
    assert set(result.outcomes) == {Arm.NO_TOOLS}
    with pytest.raises(ValueError, match="no arm 'tool'"):
        evaluate_policy(policy, settings, [], samples, arms=["tool"])
