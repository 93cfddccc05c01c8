from collections.abc import Callable

import pytest

from reframe_vl.rewards.call import CallTable, CallValue, call_reward
from reframe_vl.types import Applicability, CallRecord, CallStatus, Rollout, Sample, Termination

Make = Callable[..., Rollout]
MakeSample = Callable[..., Sample]
MakeCall = Callable[..., CallRecord]

OK, REPEATED, REFUSED, FAILED = (
    CallStatus.OK,
    CallStatus.REPEATED,
    CallStatus.REFUSED,
    CallStatus.FAILED,
)


@pytest.mark.parametrize(
    ("statuses", "beneficial", "non_beneficial"),
    [
        ([], 0.0, 0.0),
        ([OK], 1.0, -1.0),
        ([OK, OK, OK], 1.0, -1.0),
        ([OK, REPEATED, REPEATED], 1.0, -1.0),
        ([REFUSED], 0.0, -1.0),
        ([REFUSED, OK], 1.0, -1.0),
        ([FAILED], None, None),
        ([FAILED, REFUSED], None, None),
        ([FAILED, OK], 1.0, -1.0),
    ],
)
def test_the_default_table_values_calls_by_label(
    make_rollout: Make,
    make_sample: MakeSample,
    make_call: MakeCall,
    statuses: list[CallStatus],
    beneficial: float | None,
    non_beneficial: float | None,
) -> None:
    rollout = make_rollout("x", calls=[make_call(status) for status in statuses])
    values = {
        label: call_reward(rollout, make_sample(applicability=label)) for label in Applicability
    }
    assert values == {
        Applicability.BENEFICIAL: beneficial,
        Applicability.NEUTRAL: None if beneficial is None else 0.0,
        Applicability.NON_BENEFICIAL: non_beneficial,
    }


def test_without_a_label_there_is_no_term(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> None:
    assert call_reward(make_rollout("x", calls=[make_call()]), make_sample()) is None


def test_calls_of_the_gate_are_not_the_policys(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> None:
    sample = make_sample(applicability=Applicability.BENEFICIAL)
    assert call_reward(make_rollout("x", calls=[make_call(by_gate=True)]), sample) == 0.0


def test_d20_an_infrastructure_error_is_no_score(
    make_rollout: Make, make_sample: MakeSample
) -> None:
    sample = make_sample(applicability=Applicability.BENEFICIAL)
    assert call_reward(make_rollout("x", termination=Termination.ERROR), sample) is None


def test_a_table_of_ones_own_is_used(make_rollout: Make, make_sample: MakeSample) -> None:
    table = CallTable(beneficial=CallValue(if_called=2.0, if_not_called=-3.0))
    sample = make_sample(applicability=Applicability.BENEFICIAL)
    assert call_reward(make_rollout("x"), sample, table) == -3.0
