import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.evaluation.comparison import area, combine

terms = st.dictionaries(st.sampled_from("abcdef"), st.floats(-1, 1), max_size=6)


@given(terms, terms)
def test_a_difference_is_taken_on_the_items_that_both_hold(left, right):
    found = combine([(1.0, left), (-1.0, right)])
    assert found == {k: left[k] - right[k] for k in left if k in right}


def test_nothing_cannot_be_combined():
    with pytest.raises(ValueError, match="at least one"):
        combine([])


@given(
    st.dictionaries(st.integers(0, 500), st.floats(-1, 1), min_size=2, max_size=8),
)
def test_the_area_is_that_of_the_trapezoid_rule_over_its_steps(curve):
    steps = sorted(curve)
    expected = np.trapezoid([curve[s] for s in steps], steps) / (steps[-1] - steps[0])
    assert area({s: {"a": v} for s, v in curve.items()})["a"] == pytest.approx(expected, abs=1e-9)


def test_the_area_of_a_flat_curve_is_its_value_on_the_items_of_all_points():
    curve = {0: {"a": 0.5, "b": 1.0}, 10: {"a": 0.5, "b": 1.0}, 40: {"a": 0.5}}
    assert area(curve) == {"a": pytest.approx(0.5)}


def test_one_point_has_no_area():
    with pytest.raises(ValueError, match="1 points"):
        area({3: {"a": 1.0}})
