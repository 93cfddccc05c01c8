import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.evaluation.metrics import (
    GainHarm,
    ObservationDependence,
    PassAtK,
    ToolGain,
    gain_and_harm,
    observation_dependence,
    pass_at_k,
    tool_gain,
)

flags = st.booleans()
items = st.lists(st.tuples(flags, flags, flags), min_size=1, max_size=20)


def columns(rows):
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


@given(items)
def test_measures_equal_their_definitions(rows):
    a, b, c = columns(rows)
    n = len(rows)
    assert tool_gain(a, b).mean().item() == pytest.approx(
        (sum(r[0] for r in rows) - sum(r[1] for r in rows)) / n
    )
    share = [sum(r[i] for r in rows) / n for i in range(3)]
    assert observation_dependence(a, b, c).mean().item() == pytest.approx(
        share[0] - (share[1] + share[2]) / 2, abs=1e-6
    )
    assert observation_dependence(a, b, None).mean().item() == pytest.approx(
        share[0] - share[1], abs=1e-6
    )
    means = {k: v.mean().item() for k, v in gain_and_harm(a, b, c).named().items()}
    expected = {
        "gain": sum(w and not o for w, o, _ in rows),
        "harm": sum(o and not w for w, o, _ in rows),
        "gain_called": sum(w and not o and k for w, o, k in rows),
        "gain_not_called": sum(w and not o and not k for w, o, k in rows),
        "harm_called": sum(o and not w and k for w, o, k in rows),
        "harm_not_called": sum(o and not w and not k for w, o, k in rows),
    }
    assert means == pytest.approx({k: v / n for k, v in expected.items()})
    assert means["gain"] - means["harm"] == pytest.approx(tool_gain(a, b).mean().item(), abs=1e-6)


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            found = pass_at_k(torch.tensor([c]), torch.tensor([n]), k)
            assert found.item() == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_does_not_overflow():
    found = pass_at_k(torch.tensor([1, 0, 5000]), torch.tensor([10_000] * 3), 100)
    assert found.tolist() == pytest.approx([0.01, 0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(("correct", "samples", "k"), [(0, 2, 3), (3, 2, 1), (-1, 2, 1), (1, 2, 0)])
def test_impossible_counts_are_refused(correct, samples, k):
    with pytest.raises(ValueError, match=r"sample|k >= 1"):
        pass_at_k(torch.tensor([correct]), torch.tensor([samples]), k)


@given(items, st.integers(1, 5))
def test_metrics_over_batches_equal_the_mean_of_terms(rows, size):
    gain, harm, od = ToolGain(), GainHarm(), ObservationDependence()
    for start in range(0, len(rows), size):
        a, b, c = columns(rows[start : start + size])
        gain.update(a, b)
        harm.update(a, b, c)
        od.update(a, b, c)
    a, b, c = columns(rows)
    torch.testing.assert_close(gain.compute(), tool_gain(a, b).mean())
    torch.testing.assert_close(od.compute(), observation_dependence(a, b, c).mean())
    rates = harm.compute()
    for name, terms in gain_and_harm(a, b, c).named().items():
        torch.testing.assert_close(rates[name], terms.mean())


def test_metric_states_add_up_over_processes():
    one, two = PassAtK(1), PassAtK(1)
    one.update(torch.tensor([1, 0]), torch.tensor([2, 2]))
    two.update(torch.tensor([2]), torch.tensor([2]))
    one.merge_state(two)
    assert one.compute().item() == pytest.approx(0.5)
    one.reset()
    assert one.count == 0
