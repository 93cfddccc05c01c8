"""Numbers of several ranks, put together."""

import math
import statistics

import pytest

from reframe_vl.algorithms import module
from reframe_vl.algorithms.module import over_ranks


@pytest.fixture
def ranks(monkeypatch):
    def of(*values):
        monkeypatch.setattr(module.dist, "get_world_size", lambda: len(values))
        monkeypatch.setattr(
            module.dist,
            "all_gather_object",
            lambda into, own: into.__setitem__(slice(None), values),
        )

    return of


def test_numbers_are_combined_over_the_ranks_that_have_them(ranks):
    ranks({"loss_sum": 1.0, "only_here": 4.0}, {"loss_sum": 2.0})
    assert over_ranks({}, sum) == {"loss_sum": 3.0, "only_here": 4.0}
    assert over_ranks({}, statistics.fmean) == {"loss_sum": 1.5, "only_here": 4.0}


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)])
def test_what_is_no_number_on_one_rank_is_not_hidden(ranks, values):
    ranks(*({"gap_max": value} for value in values))
    assert math.isnan(over_ranks({}, sum)["gap_max"])


def test_the_largest_of_all_ranks_is_taken(ranks):
    ranks({"gap_max": 1.0}, {"gap_max": 3.0})
    assert over_ranks({}, sum) == {"gap_max": 3.0}


def test_refusals_of_a_kind_that_a_rank_had_none_of_are_none_there(ranks):
    ranks({"rollouts/refused/not_json": 0.5, "val/accuracy": 0.5}, {})
    found = over_ranks({}, statistics.fmean)
    assert found == {"rollouts/refused/not_json": 0.25, "val/accuracy": 0.5}
