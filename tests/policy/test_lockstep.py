import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.policy import lockstep
from reframe_vl.policy.lockstep import GradientOrder

CPU = torch.device("cpu")


def watched(order):
    """What a rank has seen whose gradients arrive in this order."""
    weights = [torch.zeros(2, requires_grad=True) for _ in range(4)]
    watch = GradientOrder(weights)
    for number in order:
        weights[number].sum().backward()
    return watch


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_only_gradients_that_arrive_in_one_order_on_all_ranks_are_taken(one, two):
    mine, other = watched(one), watched(two)

    def all_reduce(ends, op):
        assert op is torch.distributed.ReduceOp.MAX
        ends.copy_(ends.maximum(torch.tensor([other._seen, ~other._seen])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep.dist, "all_reduce", all_reduce)
        if one == two:
            mine.check(CPU)
        else:
            with pytest.raises(RuntimeError, match="another order"):
                mine.check(CPU)


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 3, 3]])
def test_a_gradient_that_is_missing_or_comes_twice_is_another_order(order):
    assert watched(order)._seen != watched(range(4))._seen
