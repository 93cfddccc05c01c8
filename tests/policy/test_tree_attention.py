"""Attention over a forest is attention of each context by itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reframe_vl.policy.forest import Forest, Node
from reframe_vl.policy.tree_attention import (
    TreeShape,
    _TreeAttention,
    masked_attention,
    tree_attention,
)

CPU = torch.device("cpu")


def forest(parents, lengths):
    """A forest of these nodes, which must come depth first."""
    nodes, start = [], 0
    for index, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        above = nodes[parent] if parent >= 0 else None
        depth, path = (above.depth + 1, above.path + above.length) if above else (0, 0)
        nodes.append(Node(start, length, parent, depth, path, index not in parents))
        start += length
    empty = np.zeros(start, np.int64)
    return Forest(tuple(nodes), empty, np.zeros((3, start), np.int64), empty > 0, [], [])


@st.composite
def forests(draw):
    """Parents and lengths: each node hangs from the one before it, or from an ancestor of that."""
    parents = [-1]
    for index in range(1, draw(st.integers(1, 12))):
        line = [index - 1]
        while line[-1] >= 0:
            line.append(parents[line[-1]])
        parents.append(draw(st.sampled_from(line)))
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(parents), max_size=len(parents)))
    # Equal neighbours run as one batch.
    if draw(st.booleans()):
        lengths = [1 + length % 3 for length in lengths]
    return parents, lengths


def slow(q, k, v, tree, scale):
    """Each node's softmax over its ancestors' keys and its own, put side by side."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for index, node in enumerate(tree.nodes):
        path = [tree.nodes[a] for a in (*tree.ancestors(index), index)]
        seen = [t for n in path for t in range(n.start, n.start + n.length)]
        own = slice(node.start, node.start + node.length)
        scores = torch.einsum("thd,shd->hts", q[own], k[seen]) * scale
        future = torch.ones(node.length, len(seen)).triu(1 + node.path).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, v[seen]))
    return torch.cat(outputs)


def tensors(tree, heads, groups, size, dtype=torch.float32, device=CPU):
    torch.manual_seed(len(tree))
    shapes = [(len(tree), n, size) for n in (heads * groups, heads, heads, heads * groups)]
    q, k, v, grad = (torch.randn(s, device=device, dtype=dtype) for s in shapes)
    return [x.requires_grad_() for x in (q, k, v)], grad


def with_gradients(attend, inputs, grad):
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_close(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, other.detach().abs().max().item())
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=tolerance * scale)


@settings(max_examples=30)
@given(forests(), st.integers(1, 2), st.integers(1, 3), st.sampled_from([4, 7, 16]))
def test_any_forest_is_attended_to_as_its_contexts_are(nodes, heads, groups, size):
    tree = forest(*nodes)
    inputs, grad = tensors(tree, heads, groups, size)
    shape = TreeShape.of(tree, CPU)
    expected = with_gradients(lambda q, k, v: slow(q, k, v, tree, 0.3), inputs, grad)
    for attend in (tree_attention, masked_attention):
        found = with_gradients(lambda q, k, v, a=attend: a(q, k, v, shape, 0.3), inputs, grad)
        assert_close(found, expected)


DEEP = forest([-1, 0, 1, 2, 3, 3, 2, 0, -1, 8, 8, 8], [70, 5, 40, 9, 33, 2, 1, 64, 50, 7, 7, 7])


def test_the_scale_is_the_usual_one_by_default():
    inputs, grad = tensors(DEEP, 2, 2, 16)
    shape = TreeShape.of(DEEP, CPU)
    expected = with_gradients(lambda q, k, v: slow(q, k, v, DEEP, 0.25), inputs, grad)
    for attend in (tree_attention, masked_attention):
        found = with_gradients(lambda q, k, v, a=attend: a(q, k, v, shape), inputs, grad)
        assert_close(found, expected)


def test_large_scores_neither_overflow_nor_lose_a_part():
    (q, k, v), grad = tensors(DEEP, 1, 2, 16)
    inputs = [(q * 30).detach().requires_grad_(), k, v]
    shape = TreeShape.of(DEEP, CPU)
    expected = with_gradients(lambda q, k, v: slow(q, k, v, DEEP, 1.0), inputs, grad)
    found = with_gradients(lambda q, k, v: tree_attention(q, k, v, shape, 1.0), inputs, grad)
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_close_as_the_stock_attention(dtype):
    inputs, grad = tensors(DEEP, 2, 2, 16, dtype)
    exact, exact_grad = [x.detach().float().requires_grad_() for x in inputs], grad.float()
    shape = TreeShape.of(DEEP, CPU)
    reference = with_gradients(lambda q, k, v: masked_attention(q, k, v, shape), exact, exact_grad)
    plain = with_gradients(lambda q, k, v: masked_attention(q, k, v, shape), inputs, grad)
    found = with_gradients(lambda q, k, v: tree_attention(q, k, v, shape), inputs, grad)
    for one, stock, wanted in zip(found, plain, reference, strict=True):
        assert one.dtype == dtype
        noise = (stock.float() - wanted).abs().max()
        assert (one.float() - wanted).abs().max() <= 2 * noise + 1e-3


def test_autocast_takes_its_type_as_in_stock_attention():
    inputs, _ = tensors(DEEP, 1, 2, 16)
    shape = TreeShape.of(DEEP, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = [inputs[0], inputs[1], inputs[2].bfloat16()]
        assert tree_attention(*mixed, shape).dtype == torch.bfloat16


def test_nothing_is_kept_for_a_backward_pass_but_inputs_and_result():
    inputs, _ = tensors(DEEP, 2, 2, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        out = tree_attention(*inputs, TreeShape.of(DEEP, CPU))
    log_sum_exps = len(DEEP) * 4
    assert sum(kept) == sum(x.numel() for x in inputs) + out.numel() + log_sum_exps


def test_a_node_is_read_once_by_all_that_follows_it():
    parts = TreeShape.of(DEEP, CPU).parts
    assert sum((p.queries.stop - p.queries.start) for p in parts if p.causal) == len(DEEP)
    followed = [p.keys.start for p in parts if not p.causal]
    assert followed == [n.start for n in DEEP.nodes if not n.leaf]


def test_calls_for_a_gpu_fit_its_kernels():
    """Shapes only: these a machine without a GPU can tell, too."""
    meta = torch.device("meta")
    shape = TreeShape.of(DEEP, meta)
    assert sum(part.causal for part in shape.parts) == 1
    inputs, grad = tensors(DEEP, 2, 4, 64, torch.bfloat16, meta)
    found = with_gradients(lambda *x: _TreeAttention.apply(*x, shape, 0.1), inputs, grad)
    assert [x.shape for x in found] == [x.shape for x in (inputs[0], *inputs)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 64), ("float16", 128), ("float32", 64)])
def test_a_gpu_attends_as_the_mask_says(dtype, size):
    device = torch.device("cuda")
    inputs, grad = tensors(DEEP, 2, 4, size, getattr(torch, dtype), device)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    shape = TreeShape.of(DEEP, device)
    expected = with_gradients(lambda q, k, v: masked_attention(q, k, v, shape), wide, grad.float())
    found = with_gradients(lambda q, k, v: tree_attention(q, k, v, shape), inputs, grad)
    assert_close(found, expected, 1e-4 if dtype == "float32" else 3e-2)
