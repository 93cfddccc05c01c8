import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.checkpoint.merge import (
    METHODS,
    MergeSettings,
    combined_change,
    weighted_mean,
)

vectors = st.lists(
    st.lists(st.integers(-64, 64).map(lambda i: i / 16), min_size=8, max_size=8),
    min_size=1,
    max_size=4,
)


def trimmed(vector, density):
    order = sorted(range(len(vector)), key=lambda i: -abs(vector[i]))
    kept = order[: int(density * len(vector))]
    return [v if i in kept else 0.0 for i, v in enumerate(vector)]


@given(vectors, st.integers(1, 8))
def test_ties_equals_loops_over_single_values(rows, kept):
    # Of equal magnitudes any may be dropped: make them differ.
    rows = [[v + (i + 1) / 1024 for i, v in enumerate(row)] for row in rows]
    share = [1.0 + n / 4 for n in range(len(rows))]
    settings = MergeSettings("ties", density=kept / 8)
    found = combined_change([torch.tensor(r) for r in rows], share, settings, "x")
    rows = [trimmed(row, kept / 8) for row in rows]
    for place, value in enumerate(found.tolist()):
        column = [row[place] for row in rows]
        sign = 1 if sum(column) >= 0 else -1
        agreeing = [w * v for v, w in zip(column, share, strict=True) if v * sign > 0]
        assert value == pytest.approx(sum(agreeing) / max(len(agreeing), 1), abs=1e-5)


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_what_all_checkpoints_changed_alike_is_kept_whole_by_weights_of_1(method):
    change, settings = torch.linspace(-1, 1, 50), MergeSettings(method, density=1)
    found = combined_change([change] * 3, settings.weights_of(3), settings, "x")
    torch.testing.assert_close(found, change)


@given(vectors)
def test_task_arithmetic_is_the_weighted_sum_and_linear_the_weighted_mean(rows):
    tensors, share = [torch.tensor(r) for r in rows], [1.0 + n / 4 for n in range(len(rows))]
    total = combined_change(tensors, share, MergeSettings("task_arithmetic"), "x")
    columns = list(zip(*rows, strict=True))
    sums = [sum(w * v for v, w in zip(c, share, strict=True)) for c in columns]
    assert total.tolist() == pytest.approx(sums, abs=1e-5)
    means = [value / sum(share) for value in sums]
    assert weighted_mean(tensors, share).tolist() == pytest.approx(means, abs=1e-5)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_keeps_a_part_rescaled_by_seed_and_name_and_leaves_the_generator_alone(method):
    change, settings = torch.ones(4000), MergeSettings(method, density=0.25, seed=3)
    state = torch.get_rng_state()
    found = combined_change([change], [1.0], settings, "x")
    assert torch.equal(torch.get_rng_state(), state)
    assert set(found.tolist()) == {0.0, 4.0}
    assert found.mean().item() == pytest.approx(1, abs=0.15)
    torch.rand(7)
    assert torch.equal(combined_change([change], [1.0], settings, "x"), found)
    assert not torch.equal(combined_change([change], [1.0], settings, "y"), found)
    other = MergeSettings(method, density=0.25, seed=4)
    assert not torch.equal(combined_change([change], [1.0], other, "x"), found)


@pytest.mark.parametrize("method", METHODS[2:])
def test_density_1_keeps_everything_without_a_warning(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change = torch.tensor([1.0, -2.0])
        found = combined_change([change], [1.0], MergeSettings(method, density=1), "x")
    assert torch.equal(found, change)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "slerp"}, "choose one of linear"),
        ({"density": 0}, "above 0"),
        ({"density": 1.5}, "at most 1"),
        ({"dtype": "int8"}, "choose one of float32"),
        ({"weights": [1.0]}, "2 checkpoints and 1 weights"),
        ({"weights": [1, math.nan]}, "finite"),
        ({"weights": [1, -1]}, "add up to 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        MergeSettings(**settings).weights_of(2)
