import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_step import SGD, NoImage, assert_same, fit, fixed_groups, tiny_policy
from reframe_vl.algorithms.batching import Ranks
from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.algorithms.selection import Selection, overran, right_pushed_down, select
from reframe_vl.types import (
    Answer,
    Modality,
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sample,
    Sampling,
    Termination,
)
from tiny import sampling


def reference(rewards, whole, keep, unit):
    """Kept places in order of rank, slowly."""
    ranked = []
    for group, members in enumerate(whole):
        alive = [i for i, is_whole in enumerate(members) if is_whole]
        std = float(np.std([rewards[group][i] for i in alive])) if alive else 0.0
        std = round(std, 6)
        if len(alive) >= 2 and std > 0:
            ranked.append((std, group, alive))
    ranked.sort(key=lambda entry: (-entry[0], entry[1]))
    if unit == "group":
        return {(group, i) for _, group, alive in ranked[:keep] for i in alive}
    return set([(g, i) for _, g, alive in ranked for i in alive][: keep * len(whole[0])])


@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
@pytest.mark.parametrize("unit", ["group", "rollout"])
def test_selection_equals_a_slow_reference(unit, data, num_groups, size, keep):
    tables = st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25]), min_size=size, max_size=size),
        min_size=num_groups,
        max_size=num_groups,
    )
    rewards = data.draw(tables)
    whole = [[value > 0.2 for value in row] for row in data.draw(tables)]
    kept, numbers = select(torch.tensor(rewards), torch.tensor(whole), keep, unit)
    expected = reference(rewards, whole, keep, unit)
    assert {tuple(place) for place in kept.nonzero().tolist()} == expected
    assert numbers["kept_rollouts"] == len(expected)
    assert numbers["kept_groups"] == len({group for group, _ in expected})
    counted = ("too_small", "equal_rewards", "outranked", "kept_groups")
    assert sum(numbers[name] for name in counted) == num_groups
    assert numbers["broken"] == sum(not w for row in whole for w in row)


REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 0.0, 1.0, 0.0],
        [1.0, 0.9, 1.0, float("nan")],
    ]
)
WHOLE = torch.tensor([[True] * 4, [True] * 4, [True] * 4, [True] * 3 + [False]])


def test_groups_are_kept_whole_by_the_deviation_of_their_rewards_without_the_broken():
    kept, numbers = select(REWARDS, WHOLE, 2, "group")
    assert kept.tolist() == [[True] * 4, [False] * 4, [True] * 4, [False] * 4]
    assert numbers == {
        "broken": 1,
        "too_small": 0,
        "equal_rewards": 1,
        "outranked": 1,
        "kept_groups": 2,
        "kept_rollouts": 8,
        "shortfall": 0,
    }


@given(st.lists(st.sampled_from([0.0, 1.0, 1.1, 1.2, 1.3]), min_size=2, max_size=8), st.randoms())
def test_groups_of_the_same_rewards_in_another_order_are_equals_and_kept_in_order(rewards, random):
    rows = [random.sample(rewards, len(rewards)) for _ in range(5)]
    kept, _ = select(torch.tensor(rows), torch.ones(5, len(rewards), dtype=torch.bool), 2, "group")
    teaches = len(set(rewards)) > 1
    assert kept.any(1).tolist() == [teaches, teaches, False, False, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_has_no_place_in_an_order_is_refused(value):
    rewards, whole = torch.tensor([[0.0, 1.0], [1.0, value]]), torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="not all finite"):
        select(rewards, whole, 1, "group")


def test_without_ranking_groups_that_differ_are_kept_as_they_come():
    rewards = REWARDS.flip(0)
    kept, numbers = select(rewards, WHOLE.flip(0), 1, "group", rank=False)
    assert kept.any(1).tolist() == [True, False, False, False]
    assert (numbers["outranked"], numbers["equal_rewards"]) == (2, 1)
    ranked, _ = select(rewards, WHOLE.flip(0), 1, "group")
    assert ranked.any(1).tolist() == [False, True, False, False]


def test_a_shortfall_is_counted():
    kept, numbers = select(REWARDS, WHOLE, 4, "group")
    assert kept.sum() == 11
    assert (numbers["kept_groups"], numbers["shortfall"]) == (3, 1)


def test_rollouts_are_counted_one_by_one_in_the_order_of_their_groups():
    kept, _ = select(REWARDS[:, :3], WHOLE[:, :3], 1, "rollout")
    assert kept.sum() == 3
    kept, _ = select(REWARDS, WHOLE, 3, "rollout")
    assert kept.sum() == 11


def rollout(reward, advantage, termination=Termination.ANSWERED):
    return Rollout(
        RolloutKey(0, 0, "s", 0), [], Sampling(), termination, reward=reward, advantage=advantage
    )


def test_right_rollouts_that_are_pushed_down_are_counted_among_the_trained():
    rollouts = [rollout(1.0, -0.1), rollout(1.2, 0.1), rollout(0.0, -0.3), rollout(1.0, None)]
    assert right_pushed_down(rollouts) == 0.5
    assert right_pushed_down([]) == 0.0


def test_keeping_nothing_is_refused():
    with pytest.raises(ValueError, match=r"selection\.keep is 0"):
        Selection(0)


def test_ranks_choose_from_all_groups_as_one_that_had_them_all():
    rewards = [[0, 1], [0, 3], [0, 2], [1, 1], [0, 5]]
    asked = Sample("s", Modality.IMAGE, NoImage(), "?", Answer("open", "x"))

    def groups():
        return [RolloutGroup(asked, [rollout(float(r), 0.5) for r in row]) for row in rewards]

    def kept(part):
        return [[r.advantage for r in group.rollouts] for group in part]

    one = groups()
    numbers = Selection(3).apply(one)
    tables = [[[(float(r), True) for r in row] for row in rewards[rank::2]] for rank in range(2)]
    for rank in range(2):
        part = groups()[rank::2]
        found = Selection(3).apply(part, Ranks(rank, lambda own: tables))
        assert found["kept_groups"] == numbers["kept_groups"] == 3
        assert kept(part) == kept(one)[rank::2]


SETTINGS = {"subgroups": False, "scale": "none"}


def gradient(settings, groups_of):
    policy = tiny_policy()
    module = GDGRPO(settings, policy=policy, optimizer=SGD)
    groups = groups_of(policy.model)
    return fit(module, groups, 2), groups, module


def test_the_step_is_that_of_the_kept_groups_alone():
    def all_groups(model):
        groups = fixed_groups(model, sampling())
        groups[0].rollouts[0].termination = Termination.MAX_TOKENS
        return groups

    selected, groups, module = gradient(
        GRPOSettings(selection=Selection(2), **SETTINGS), all_groups
    )
    kept = [i for i, g in enumerate(groups) if any(r.advantage is not None for r in g.rollouts)]
    assert len(kept) == 2 and 1 not in kept
    stds = [
        np.std([r.reward for r in g.rollouts if r.reward is not None and not overran(r)])
        for g in groups
    ]
    assert set(kept) == set(np.argsort(stds)[-2:])
    for index in kept:
        for member in groups[index].rollouts:
            assert (member.advantage is None) == (member.reward is None or overran(member))
    logged = module.trainer.callback_metrics
    assert logged["selection/kept_groups"] == 2 and logged["selection/broken"] == 2

    def those(model):
        found = [all_groups(model)[index] for index in kept]
        for group in found:
            for member in group.rollouts:
                member.reward = None if overran(member) else member.reward
        return found

    alone, _, _ = gradient(GRPOSettings(**SETTINGS), those)
    assert_same(selected, alone)


def test_a_step_without_a_group_to_keep_trains_nothing_and_goes_on(caplog):
    def equal(model):
        groups = fixed_groups(model, sampling(), num_groups=2)
        for group in groups:
            for member in group.rollouts:
                member.reward = 1.0
        return groups

    found, groups, _ = gradient(GRPOSettings(selection=Selection(2), **SETTINGS), equal)
    assert all(r.advantage is None for g in groups for r in g.rollouts)
    assert all(not value.any() for value in found.values())
    assert "Nothing is learned" in caplog.text
