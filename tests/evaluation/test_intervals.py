import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.evaluation.intervals import hierarchical_interval


def slow_draws(values, media, bases, seeds, resamples, rng):
    """The definition, one draw at a time, over a nested dictionary."""
    runs = {}
    for value, medium, base, seed in zip(values, media, bases, seeds, strict=True):
        runs.setdefault(base, {}).setdefault(seed, {}).setdefault(medium, []).append(value)
    pool = sorted(set(media))
    for _ in range(resamples):
        drawn_media = [pool[i] for i in rng.integers(len(pool), size=len(pool))]
        base_means = []
        for base in (list(runs)[i] for i in rng.integers(len(runs), size=len(runs))):
            seeds_of_base = list(runs[base].values())
            seed_means = []
            for i in rng.integers(len(seeds_of_base), size=len(seeds_of_base)):
                seen = [v for m in drawn_media for v in seeds_of_base[i][m]]
                seed_means.append(sum(seen) / len(seen))
            base_means.append(sum(seed_means) / len(seed_means))
        yield sum(base_means) / len(base_means)


def crossed_runs(rng, num_bases, num_seeds, num_media, per_medium):
    rows = list(
        itertools.product(range(num_bases), range(num_seeds), range(num_media), range(per_medium))
    )
    effects = [rng.normal(size=n) for n in (num_bases, num_bases * num_seeds, num_media)]
    values = np.array(
        [
            effects[0][b] + effects[1][b * num_seeds + s] + 2 * effects[2][m] + rng.normal()
            for b, s, m, _ in rows
        ]
    )
    bases, seeds, media, _ = zip(*rows, strict=True)
    return values, media, bases, seeds


@pytest.mark.parametrize("shape", [(1, 1, 12, 1), (1, 1, 8, 3), (3, 2, 10, 1), (2, 1, 6, 2)])
def test_intervals_equal_a_slow_bootstrap_over_bases_seeds_and_media(shape):
    values, media, bases, seeds = crossed_runs(np.random.default_rng(sum(shape)), *shape)
    fast = hierarchical_interval(values, media, bases=bases, seeds=seeds, resamples=20_000)
    slow = list(slow_draws(values, media, bases, seeds, 1500, np.random.default_rng(1)))
    low, high = np.quantile(slow, [0.025, 0.975])
    assert fast.value == pytest.approx(values.mean())
    width = high - low
    assert abs(fast.low - low) < 0.12 * width
    assert abs(fast.high - high) < 0.12 * width


def test_one_run_is_a_cluster_bootstrap_near_the_normal_interval():
    rng = np.random.default_rng(0)
    values = rng.normal(size=400)
    media = [str(i) for i in range(400)]
    found = hierarchical_interval(values, media)
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.02)
    assert found.high == pytest.approx(values.mean() + half, abs=0.02)


def test_items_of_one_medium_are_drawn_together():
    rng = np.random.default_rng(0)
    once = rng.normal(size=50)
    plain = hierarchical_interval(once, range(50))
    copied = hierarchical_interval(np.repeat(once, 4), np.repeat(range(50), 4).tolist())
    assert copied.to_dict() == pytest.approx(plain.to_dict())
    as_if_independent = hierarchical_interval(np.repeat(once, 4), range(200))
    assert as_if_independent.high - as_if_independent.low < 0.7 * (copied.high - copied.low)


def test_more_seeds_of_one_base_do_not_hide_the_spread_of_bases():
    # Bases differ, their seeds do not: only the number of bases counts.
    values = np.repeat([0.0, 1.0], 300)
    bases = np.repeat(["a", "b"], 300).tolist()
    seeds = np.tile(np.arange(30), 20).tolist()
    found = hierarchical_interval(values, [0] * 600, bases=bases, seeds=seeds)
    assert (found.low, found.high) == (0.0, 1.0)


def test_bases_with_more_seeds_do_not_count_more():
    values = np.array([0.0, 1.0, 1.0, 1.0])
    found = hierarchical_interval(values, ["m"] * 4, bases=["a", "b", "b", "b"], seeds=[0, 0, 1, 2])
    assert found.value == 0.5


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.integers(0, 4), st.integers(0, 1), st.integers(0, 2)),
        min_size=1,
        max_size=30,
    )
)
def test_intervals_lie_within_the_values_and_depend_on_the_seed_only(rows):
    values, media, bases, seeds = zip(*rows, strict=True)
    values = np.array(values, float)
    one, two = (
        hierarchical_interval(values, media, bases=bases, seeds=seeds, resamples=50)
        for _ in range(2)
    )
    assert one == two
    assert values.min() - 1e-9 <= one.low <= one.high <= values.max() + 1e-9


def test_a_large_set_is_drawn_in_parts(monkeypatch):
    values, media, bases, seeds = crossed_runs(np.random.default_rng(0), 1, 2, 20, 1)
    whole = hierarchical_interval(values, media, bases=bases, seeds=seeds)
    monkeypatch.setattr("reframe_vl.evaluation.intervals._MAX_DRAWS", 1000)
    parts = hierarchical_interval(values, media, bases=bases, seeds=seeds)
    assert parts.to_dict() == pytest.approx(whole.to_dict())


def test_labels_that_do_not_fit_the_values_are_refused():
    with pytest.raises(ValueError, match="2 media"):
        hierarchical_interval(np.zeros(3), ["a", "b"])
    with pytest.raises(ValueError, match="at least one value"):
        hierarchical_interval(np.zeros(0), [])


def test_media_are_drawn_within_each_set_and_sets_count_the_same():
    rng = np.random.default_rng(0)
    # The sets differ by far more than their items do: drawing from one pool would show that.
    values = np.concatenate([rng.normal(0, 0.1, 40), rng.normal(10, 0.1, 160)])
    media, strata = list(range(200)), ["image"] * 40 + ["video"] * 160
    found = hierarchical_interval(values, media, strata=strata)
    assert found.value == pytest.approx((values[:40].mean() + values[40:].mean()) / 2)
    errors = [part.std() / np.sqrt(len(part)) for part in (values[:40], values[40:])]
    width = 2 * 1.96 * np.hypot(*errors) / 2
    assert found.high - found.low == pytest.approx(width, rel=0.15)
    pooled = hierarchical_interval(values, media)
    assert pooled.high - pooled.low > 10 * width


def test_one_set_changes_nothing():
    values, media, bases, seeds = crossed_runs(np.random.default_rng(0), 2, 2, 8, 1)
    alone = hierarchical_interval(values, media, bases=bases, seeds=seeds)
    assert alone == hierarchical_interval(
        values, media, bases=bases, seeds=seeds, strata=["all"] * len(values)
    )


def test_a_run_without_values_in_a_set_is_refused():
    with pytest.raises(ValueError, match="no value in one of the sets"):
        hierarchical_interval(np.zeros(3), "abc", bases=[0, 0, 1], strata=["a", "b", "a"])
