import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.rollout.drop import draw_drops


def test_bernoulli_drops_have_their_probability():
    rng = np.random.default_rng(0)
    drops = [d for _ in range(2000) for d in draw_drops(8, 0.3, "bernoulli", rng)]
    assert abs(np.mean(drops) - 0.3) < 0.02


@given(st.integers(4, 16), st.floats(0, 1), st.integers(0, 99))
def test_stratified_drops_never_leave_a_member_alone(size, probability, seed):
    drops = draw_drops(size, probability, "stratified", np.random.default_rng(seed))
    assert len(drops) == size
    assert sum(drops) != 1 and size - sum(drops) != 1


@pytest.mark.parametrize("mode", ["bernoulli", "stratified"])
def test_probabilities_0_and_1_are_certain(mode):
    rng = np.random.default_rng(0)
    assert not any(draw_drops(8, 0.0, mode, rng))
    assert all(draw_drops(8, 1.0, mode, rng))


def test_a_wrong_probability_or_mode_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"1\.5"):
        draw_drops(8, 1.5, "bernoulli", rng)
