from collections.abc import Callable

import pytest

from reframe_vl.rewards.tool_use import tool_use_reward
from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.types import CallRecord, CallStatus, Rollout, Sample, Termination

Make = Callable[..., Rollout]
MakeSample = Callable[..., Sample]
PYVISION = RewardWeights(call=0.0, grounding=0.0, penalty=0.0, tool_use=0.1)


def calls(*statuses: CallStatus, by_gate: bool = False) -> list[CallRecord]:
    return [CallRecord(0, "python", {"code": "1"}, s, by_gate=by_gate) for s in statuses]


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("right", [False, True])
def test_the_total_is_pyvisions_formula(
    make_rollout: Make, make_sample: MakeSample, number: int, right: bool
) -> None:
    rollout = make_rollout("red car" if right else "cat", calls=calls(*[CallStatus.OK] * number))
    components, total = score(rollout, make_sample(), PYVISION, 0.5)
    assert components["tool_use"] == number * right
    assert total == pytest.approx(right * (1 + 0.1 * number))


def test_only_the_policys_own_executed_calls_count(make_rollout: Make) -> None:
    others = calls(CallStatus.REFUSED, CallStatus.FAILED, CallStatus.REPEATED, CallStatus.REPLACED)
    made = [*others, *calls(CallStatus.OK), *calls(CallStatus.OK, by_gate=True)]
    assert tool_use_reward(make_rollout("x", calls=made), 1.0) == 1.0


def test_without_an_answer_score_there_is_none(make_rollout: Make, make_sample: MakeSample) -> None:
    failed = make_rollout("red car", termination=Termination.ERROR)
    components, total = score(failed, make_sample(), PYVISION, 0.0)
    assert components["tool_use"] is None and total is None
