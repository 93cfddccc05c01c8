import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.rewards.validity import ValidityWeights
from reframe_vl.types import Applicability, CallRecord, Evidence, Rollout, Sample, Termination

Make = Callable[..., Rollout]
MakeSample = Callable[..., Sample]
MakeCall = Callable[..., CallRecord]

BOX = (0.0, 0.0, 2.0, 2.0)
WEIGHTS = RewardWeights(
    call=0.5, kappa=2.0, grounding=0.25, validity=ValidityWeights(several_answers=0.125)
)


@pytest.fixture
def case(
    make_rollout: Make, make_sample: MakeSample, make_call: MakeCall
) -> tuple[Rollout, Sample]:
    rollout = make_rollout("blue car", "red car", calls=[make_call(boxes=((0.0, 0.0, 2.0, 1.0),))])
    return rollout, make_sample(
        evidence=Evidence(boxes=(BOX,)), applicability=Applicability.BENEFICIAL
    )


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_the_total_is_the_formula(case: tuple[Rollout, Sample], progress: float) -> None:
    components, total = score(*case, WEIGHTS, progress)
    assert components == {"answer": 1.0, "call": 1.0, "grounding": 0.5, "penalty": 0.125}
    decay = (math.exp(-2 * progress) - math.exp(-2)) / (1 - math.exp(-2))
    assert total == pytest.approx(1.0 + 0.5 * decay * 1.0 + 0.25 * 0.5 - 0.125)


def test_terms_that_do_not_apply_are_omitted(make_rollout: Make, make_sample: MakeSample) -> None:
    components, total = score(make_rollout("red car"), make_sample(), WEIGHTS, 0.0)
    assert components == {"answer": 1.0, "call": None, "grounding": None, "penalty": 0.0}
    assert total == 1.0


def test_d20_an_infrastructure_error_has_no_component_and_no_total(
    case: tuple[Rollout, Sample],
) -> None:
    rollout, sample = case
    failed = replace(rollout, termination=Termination.ERROR)
    components, total = score(failed, sample, WEIGHTS, 0.0)
    assert components == dict.fromkeys(("answer", "call", "grounding", "penalty"))
    assert total is None


def test_the_total_is_vision_ekipls_formula(make_rollout: Make, make_sample: MakeSample) -> None:
    weights = RewardWeights(call=0.0, grounding=0.0, penalty=0.0, form=1.0)
    totals = {
        answers: score(make_rollout(*answers), make_sample(), weights, 0.0)[1]
        for answers in (("red car",), ("blue",), ("blue", "red car"), ())
    }
    assert totals == {("red car",): 2.0, ("blue",): 1.0, ("blue", "red car"): 1.0, (): 0.0}


def test_a_weight_of_zero_switches_a_term_off_and_still_shows_it(
    case: tuple[Rollout, Sample],
) -> None:
    off = RewardWeights(call=0.0, grounding=0.0, penalty=0.0)
    components, total = score(*case, off, 0.0)
    assert components["grounding"] == 0.5
    assert total == 1.0


@pytest.mark.parametrize("name", ["call", "kappa", "grounding", "penalty"])
@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_a_weight_that_is_not_0_or_more_is_refused_by_name(name: str, value: float) -> None:
    weights: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=rf"reward\.{name} is {value}"):
        RewardWeights(**weights)


def test_the_rollout_is_only_read(case: tuple[Rollout, Sample]) -> None:
    score(*case, WEIGHTS, 0.5)
    assert case[0].reward is None
    assert case[0].rewards == {}
