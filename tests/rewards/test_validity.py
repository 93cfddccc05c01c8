from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.rewards.validity import ValidityWeights, validity_counts, validity_penalty
from reframe_vl.types import (
    CallRecord,
    CallStatus,
    Rollout,
    RolloutKey,
    Sampling,
    Termination,
)

Make = Callable[..., Rollout]
MakeCall = Callable[..., CallRecord]


def counted(rollout: Rollout) -> dict[str, int]:
    return {entry: count for entry, count in validity_counts(rollout).items() if count}


def test_every_count_has_a_weight(make_rollout: Make) -> None:
    names = {entry.name for entry in fields(ValidityWeights)}
    assert set(validity_counts(make_rollout("x"))) == names - {"max_counted", "max_total"}


@pytest.mark.parametrize(
    ("ending", "entry"),
    [
        (Termination.NO_ANSWER, "no_answer"),
        (Termination.TRUNCATED, "truncated"),
        (Termination.MAX_TURNS, "truncated"),
        (Termination.MAX_TOKENS, "truncated"),
        (Termination.MAX_VISUAL_TOKENS, "truncated"),
        (Termination.REFUSAL_STREAK, "refusal_streak"),
        (Termination.ERROR, None),
    ],
)
def test_each_ending_counts_once(
    make_rollout: Make, ending: Termination, entry: str | None
) -> None:
    assert counted(make_rollout(termination=ending)) == ({entry: 1} if entry else {})


def test_a_good_rollout_costs_nothing(make_rollout: Make, make_call: MakeCall) -> None:
    assert validity_penalty(make_rollout("x", calls=[make_call()]), ValidityWeights()) == 0.0


def test_d15_several_answer_blocks_cost_even_where_they_agree(make_rollout: Make) -> None:
    assert counted(make_rollout("x", "y")) == {"several_answers": 1}
    assert counted(make_rollout("x", "x", "x")) == {"several_answers": 1}


def test_d13_an_empty_answer_costs_as_much_as_none(make_rollout: Make) -> None:
    assert counted(make_rollout(" ")) == {"no_answer": 1}


def test_tool_failures_and_the_gates_calls_cost_nothing(
    make_rollout: Make, make_call: MakeCall
) -> None:
    calls = [make_call(CallStatus.FAILED), make_call(CallStatus.REFUSED, by_gate=True)]
    assert counted(make_rollout("x", calls=calls)) == {}


def test_calls_are_counted_each_up_to_the_cap(make_rollout: Make, make_call: MakeCall) -> None:
    weights = ValidityWeights(refused_call=0.1, repeated_call=0.01, max_counted=3)
    calls = [make_call(CallStatus.REFUSED)] * 2 + [make_call(CallStatus.REPEATED)] * 9
    rollout = make_rollout("x", calls=calls)
    assert counted(rollout) == {"refused_call": 2, "repeated_call": 9}
    assert validity_penalty(rollout, weights) == pytest.approx(0.23)


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="refused_call"):
        ValidityWeights(refused_call=-0.1)
    with pytest.raises(ValueError, match="truncated"):
        ValidityWeights(truncated=float("nan"))


@given(
    st.lists(st.sampled_from(CallStatus), max_size=30),
    st.lists(st.text(max_size=3), max_size=3),
    st.sampled_from(Termination),
)
def test_the_penalty_lies_between_zero_and_the_cap(
    statuses: list[CallStatus], answers: list[str], ending: Termination
) -> None:
    calls = [CallRecord(0, "t", {}, status) for status in statuses]
    key = RolloutKey(0, 0, "s", 0)
    rollout = Rollout(key, [], Sampling(), ending, calls=calls, answers=answers)
    assert 0.0 <= validity_penalty(rollout, ValidityWeights(max_total=0.7)) <= 0.7
