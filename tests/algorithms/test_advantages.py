import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reframe_vl.algorithms.advantages import drop_subgroup_advantages, group_advantages

# Multiples of 1/8: equal or clearly apart, so that no property hangs on a rounding.
rewards = st.integers(-24, 24).map(lambda n: n / 8)
members = st.lists(st.tuples(rewards, st.booleans(), st.booleans()), max_size=12)
scales = st.sampled_from(["std", "none"])


def flags(*values: bool) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def everyone(rewards_G: Tensor) -> Tensor:
    return torch.ones(rewards_G.shape, dtype=torch.bool)


def columns(group: list[tuple[float, bool, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor([reward for reward, _, _ in group], dtype=torch.float32),
        flags(*(dropped for _, dropped, _ in group)),
        flags(*(scorable for _, _, scorable in group)),
    )


def reference(values: list[float], scale: str, eps: float) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    divisor = statistics.pstdev(values) + eps if scale == "std" else 1.0
    return [(value - mean) / divisor for value in values]


@given(members, scales)
def test_group_advantages_equal_the_formula(group, scale):
    rewards_G, _, scorable_G = columns(group)
    out_G = group_advantages(rewards_G, scorable_G, scale=scale, eps=1e-3)
    expected = iter(reference([r for r, _, s in group if s], scale, 1e-3))
    wanted_G = torch.tensor([next(expected) if s else 0.0 for _, _, s in group])
    assert out_G.dtype == torch.float32
    torch.testing.assert_close(out_G, wanted_G, rtol=1e-6, atol=1e-6)


@given(members, scales)
def test_subgroup_advantages_equal_the_formula_within_each_drop_flag(group, scale):
    out_G = drop_subgroup_advantages(*columns(group), scale=scale, eps=1e-3)
    for flag in (False, True):
        inside = [i for i, (_, d, s) in enumerate(group) if s and d == flag]
        wanted = reference([group[i][0] for i in inside], scale, 1e-3)
        assert out_G[inside].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    outside = [i for i, (_, _, s) in enumerate(group) if not s]
    assert not out_G[outside].any()


@given(members, scales)
def test_subgroups_do_not_see_each_other(group, scale):
    rewards_G, dropped_G, scorable_G = columns(group)
    before_G = drop_subgroup_advantages(rewards_G, dropped_G, scorable_G, scale=scale)
    moved_G = torch.where(dropped_G, rewards_G * 3 + 1, rewards_G)
    after_G = drop_subgroup_advantages(moved_G, dropped_G, scorable_G, scale=scale)
    assert torch.equal(before_G[~dropped_G], after_G[~dropped_G])


@given(members, scales)
def test_one_drop_flag_for_all_is_the_plain_group(group, scale):
    rewards_G, _, scorable_G = columns(group)
    plain_G = group_advantages(rewards_G, scorable_G, scale=scale)
    for dropped_G in (torch.zeros_like(scorable_G), torch.ones_like(scorable_G)):
        sub_G = drop_subgroup_advantages(rewards_G, dropped_G, scorable_G, scale=scale)
        assert torch.equal(plain_G, sub_G)


@given(members, scales, st.integers(-80, 80), st.randoms(use_true_random=False))
def test_advantages_ignore_a_shift_and_follow_a_permutation(group, scale, shift, random):
    rewards_G, dropped_G, scorable_G = columns(group)
    out_G = drop_subgroup_advantages(rewards_G, dropped_G, scorable_G, scale=scale)
    shifted_G = drop_subgroup_advantages(rewards_G + shift, dropped_G, scorable_G, scale=scale)
    torch.testing.assert_close(out_G, shifted_G, rtol=1e-6, atol=1e-6)
    order = random.sample(range(len(group)), len(group))
    permuted_G = drop_subgroup_advantages(
        rewards_G[order], dropped_G[order], scorable_G[order], scale=scale
    )
    torch.testing.assert_close(out_G[order], permuted_G, rtol=1e-6, atol=1e-6)


@given(members, st.sampled_from([0.125, 0.5, 3.0, 40.0]))
def test_scale_of_the_rewards_cancels_with_std_and_stays_without(group, factor):
    rewards_G, _, scorable_G = columns(group)
    for scale, ratio in (("std", 1.0), ("none", factor)):
        out_G = group_advantages(rewards_G, scorable_G, scale=scale, eps=1e-12)
        scaled_G = group_advantages(rewards_G * factor, scorable_G, scale=scale, eps=1e-12)
        torch.testing.assert_close(out_G * ratio, scaled_G, rtol=1e-5, atol=1e-6)


@given(members, scales)
def test_advantages_of_the_scorable_sum_to_zero(group, scale):
    rewards_G, _, scorable_G = columns(group)
    assert abs(float(group_advantages(rewards_G, scorable_G, scale=scale).sum())) < 1e-5


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, 7e3, 0.0, -0.7])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(scale, dtype, value, size):
    rewards_G = torch.full((size,), value, dtype=dtype)
    assert not group_advantages(rewards_G, everyone(rewards_G), scale=scale).any()


def test_rewards_equal_but_for_rounding_give_exactly_zero():
    rewards_G = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.1 + 0.1], dtype=torch.float64)
    assert rewards_G.unique().numel() > 1
    assert not group_advantages(rewards_G, everyone(rewards_G), eps=1e-20).any()


def test_small_but_real_differences_count():
    rewards_G = torch.tensor([1.0, 1.0 + 1e-5])
    out_G = group_advantages(rewards_G, everyone(rewards_G), eps=1e-9)
    torch.testing.assert_close(out_G, torch.tensor([-1.0, 1.0]), rtol=1e-3, atol=0)


def test_c02_a_group_or_subgroup_of_one_gets_zero_beside_larger_ones():
    assert group_advantages(torch.tensor([5.0]), flags(True)).tolist() == [0.0]
    three_G = group_advantages(torch.tensor([0.0, 0.0, 3.0]), flags(True, True, True), scale="none")
    assert three_G.tolist() == [-1.0, -1.0, 2.0]
    out_G = drop_subgroup_advantages(
        torch.tensor([9.0, 0.0, 1.0]), flags(True, False, False), flags(True, True, True)
    )
    assert out_G[0] == 0
    assert out_G[1] == -out_G[2] != 0


def test_c02_a_group_with_one_scorable_member_gets_zero():
    out_G = group_advantages(torch.tensor([1.0, 0.0, 0.0]), flags(True, False, False))
    assert out_G.tolist() == [0.0, 0.0, 0.0]


def test_an_empty_group_gives_an_empty_answer():
    assert group_advantages(torch.zeros(0), flags()).shape == (0,)
    assert drop_subgroup_advantages(torch.zeros(0), flags(), flags()).shape == (0,)


def test_c04_statistics_are_per_prompt_and_shuffling_prompts_changes_nothing():
    prompts = {
        "easy": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "hard": torch.tensor([0.0, 0.0, 0.0, 1.0]),
        "scaled": torch.tensor([100.0, 300.0]),
    }

    def step(order: list[str]) -> dict[str, list[float]]:
        return {n: group_advantages(prompts[n], everyone(prompts[n])).tolist() for n in order}

    forward = step(list(prompts))
    assert forward == step(list(reversed(prompts)))
    # The hard prompt's one success counts as much as the easy prompt's one failure.
    assert forward["hard"][3] == pytest.approx(-forward["easy"][3])
    assert forward["scaled"] == pytest.approx([-1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e9])
def test_members_that_are_not_scorable_may_hold_anything(junk):
    clean_G = group_advantages(torch.tensor([0.0, 1.0]), flags(True, True))
    out_G = group_advantages(torch.tensor([0.0, junk, 1.0]), flags(True, False, True))
    assert out_G[[0, 2]].tolist() == clean_G.tolist()
    assert out_G[1] == 0


@pytest.mark.parametrize("junk", [float("nan"), float("-inf")])
def test_a_scorable_reward_that_is_not_finite_is_refused_by_position(junk):
    with pytest.raises(ValueError, match=r"rollouts \[1\]"):
        group_advantages(torch.tensor([0.0, junk, 1.0]), flags(True, True, True))
    with pytest.raises(ValueError, match=r"rollouts \[1\]"):
        drop_subgroup_advantages(
            torch.tensor([0.0, junk, 1.0]), flags(False, True, False), flags(True, True, True)
        )
