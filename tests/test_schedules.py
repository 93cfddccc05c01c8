import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.schedules import CallDecay, Constant, Cosine, Linear, call_decay

PROGRESS = st.floats(0, 1)
VALUE = st.floats(-10, 10)


@given(PROGRESS, st.floats(0.1, 20))
def test_call_decay_is_the_formula(progress: float, kappa: float) -> None:
    end = math.exp(-kappa)
    expected = (math.exp(-kappa * progress) - end) / (1 - end)
    assert call_decay(progress, kappa) == pytest.approx(expected, abs=1e-12)


@given(st.floats(0, 1e6))
def test_call_decay_starts_at_one_and_ends_at_zero(kappa: float) -> None:
    assert call_decay(0.0, kappa) == 1.0
    assert call_decay(1.0, kappa) == 0.0


@given(PROGRESS, PROGRESS, st.floats(0, 1e6))
def test_call_decay_never_rises_and_stays_between(a: float, b: float, kappa: float) -> None:
    early, late = sorted((a, b))
    assert 0.0 <= call_decay(late, kappa) <= call_decay(early, kappa) * (1 + 1e-12) <= 1 + 1e-12


@given(PROGRESS, st.floats(0, 1e-6))
def test_call_decay_tends_to_the_straight_line(progress: float, kappa: float) -> None:
    assert call_decay(progress, kappa) == pytest.approx(1 - progress, abs=1e-6)


@pytest.mark.parametrize("kappa", [-1.0, math.nan, math.inf])
def test_a_kappa_without_meaning_is_refused(kappa: float) -> None:
    with pytest.raises(ValueError, match="kappa"):
        call_decay(0.5, kappa)


@pytest.mark.parametrize(
    "schedule", [CallDecay(1.0), Constant(1.0), Linear(0.0, 1.0), Cosine(0.0, 1.0)]
)
@pytest.mark.parametrize("progress", [-0.01, 1.01, math.nan])
def test_progress_outside_a_run_is_refused(
    schedule: CallDecay | Constant | Linear | Cosine, progress: float
) -> None:
    with pytest.raises(ValueError, match="progress"):
        schedule(progress)


@given(VALUE, VALUE, PROGRESS)
def test_schedules_meet_their_ends_and_stay_between(start: float, end: float, p: float) -> None:
    low, high = sorted((start, end))
    for schedule in (Linear(start, end), Cosine(start, end)):
        assert schedule(0.0) == start
        assert schedule(1.0) == end
        assert low - 1e-9 <= schedule(p) <= high + 1e-9


@given(VALUE, VALUE, PROGRESS)
def test_cosine_is_symmetric_about_its_middle(start: float, end: float, p: float) -> None:
    schedule = Cosine(start, end)
    assert schedule(p) + schedule(1 - p) == pytest.approx(start + end, abs=1e-9)


@given(VALUE, PROGRESS)
def test_constant_is_constant(value: float, p: float) -> None:
    assert Constant(value)(p) == value
