from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.data.order import MixedOrder, SeededOrder, shares

GROUPS = np.array(["a"] * 60 + ["b"] * 30 + ["c"] * 10, object)


def drawn(order: MixedOrder | SeededOrder, positions, size=100) -> list[int]:
    return [order.index(position, size) for position in positions]


def test_a_pass_has_each_thing_once_and_the_next_one_another_order() -> None:
    first, second = drawn(SeededOrder(3), range(100)), drawn(SeededOrder(3), range(100, 200))
    assert sorted(first) == sorted(second) == list(range(100)) and first != second
    assert drawn(SeededOrder(3, 1), range(100)) != first


def test_each_pass_has_its_shares_and_nothing_comes_again_before_its_group_is_through() -> None:
    order = MixedOrder(0, {"a": 1, "b": 2, "c": 1}, lambda: GROUPS)
    indices = drawn(order, range(1000))
    for start in range(0, 1000, 100):
        assert Counter(GROUPS[indices[start : start + 100]]) == {"a": 25, "b": 50, "c": 25}
    for name in "abc":
        own, size = [i for i in indices if GROUPS[i] == name], int((name == GROUPS).sum())
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


def test_the_mixed_order_depends_on_seed_and_position_alone() -> None:
    def order(seed=0):
        return MixedOrder(seed, {"a": 1, "b": 2, "c": 1}, lambda: GROUPS)

    in_turn = drawn(order(), range(500))
    assert [order().index(at, 100) for at in (0, 7, 123, 450)] == [
        in_turn[at] for at in (0, 7, 123, 450)
    ]
    backwards = order()
    assert drawn(backwards, range(499, -1, -1)) == in_turn[::-1]
    assert drawn(order(1), range(500)) != in_turn


def test_a_weight_of_0_leaves_a_group_out_and_groups_may_lose_members() -> None:
    groups = GROUPS
    order = MixedOrder(0, {"a": 0, "b": 1, "c": 1}, lambda: groups)
    assert Counter(GROUPS[drawn(order, range(100))]) == {"b": 50, "c": 50}
    groups = GROUPS[20:]
    assert Counter(groups[drawn(order, range(80), 80)]) == {"b": 40, "c": 40}


def test_a_group_that_is_left_out_whole_leaves_the_proportions_of_the_others(caplog) -> None:
    groups = GROUPS
    order = MixedOrder(0, {"a": 1, "b": 1, "c": 3, "none": 0}, lambda: groups)
    groups = GROUPS[GROUPS != "a"]
    found = Counter(groups[drawn(order, range(80), len(groups))])
    assert found["c"] == 3 * found["b"]
    assert "All records of a were left out" in caplog.text
    groups = GROUPS[:0]
    with pytest.raises(ValueError, match="All records with a weight above 0"):
        order.index(0, 1)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1, "b": 1}, "no weight for c: give one for each of a, b, c"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "weights for d, of which there is no usable record"),
        ({"a": -1, "b": 1, "c": 1}, "at least 0"),
        ({"a": float("nan"), "b": 1, "c": 1}, "at least 0"),
        ({"a": 10**400, "b": 1, "c": 1}, "at least 0"),
        ({"a": 0, "b": 0, "c": 0}, "one of them above 0"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights, words) -> None:
    with pytest.raises(ValueError, match=words):
        MixedOrder(0, weights, lambda: GROUPS)


@given(st.lists(st.floats(0, 1e6), min_size=1).filter(any), st.integers(1, 10**6))
def test_shares_add_up_and_are_exact_to_one(weights, size) -> None:
    counts = shares(weights, size)
    assert sum(counts) == size and min(counts) >= 0
    total = sum(weights)
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - weight / total * size) < 1.001


def test_a_group_that_no_pass_draws_is_said_at_the_start(caplog) -> None:
    MixedOrder(0, {"a": 1, "b": 1, "c": 1e-4}, lambda: GROUPS)
    assert "No record of c is ever drawn" in caplog.text and "0.005 of the 100 draws" in caplog.text
    caplog.clear()
    order = MixedOrder(0, {"a": 1, "b": 1, "c": 0.05}, lambda: GROUPS)
    assert not caplog.text and "c" in GROUPS[drawn(order, range(100))]


def test_shares_of_huge_weights_are_shares() -> None:
    assert shares([1.7e308, 1.7e308], 10) == [5, 5]
