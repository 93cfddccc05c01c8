"""Attention over a forest: a node's keys and values are read once for all that follows it.

A token attends to its own node up to itself and to all of its ancestors. In packed order a node's
descendants lie right behind it, so that all of this is attention between slices: of each node's
tokens among themselves, and of all its descendants' queries to its keys, without a mask. Nothing is
gathered or repeated. A query's partial results, one for its node and one for each ancestor, are put
together by their log-sum-exps, as in ring attention (Liu et al., 2023):

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

Of the rest of a row, the gradient of a softmax needs ``out`` and ``lse`` alone. Given these instead
of its own, the backward kernel of a partial attention returns just its share of the gradient.

Where no kernel reports log-sum-exps, ``masked_attention`` gives the same result by a mask.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from reframe_vl.policy.forest import Forest

_aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """A partial attention: pieces that lie back to back, each of its own queries to its own keys.

    Attributes:
        queries: Packed tokens that attend.
        keys: Packed tokens that are attended to.
        causal: Whether queries and keys are the same tokens, which see only what precedes them.
        query_offsets: Where each piece begins within ``queries``, and where the last one ends.
        key_offsets: The same of ``keys``.
        max_queries: Of any piece.
        max_keys: Of any piece.
    """

    queries: slice
    keys: slice
    causal: bool
    query_offsets: Int[Tensor, "N1"]
    key_offsets: Int[Tensor, "N1"]
    max_queries: int
    max_keys: int

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self.query_offsets) - 1


@dataclass(frozen=True)
class TreeShape:
    """How a forest's tokens attend.

    Attributes:
        parts: Those of nodes to themselves, which take every token once, then those to ancestors.
        trees: Each root with its descendants.
        seen_until: For each token, the end of its node's descendants: none after it sees the token.
    """

    parts: tuple[Part, ...]
    trees: tuple[slice, ...]
    seen_until: Int[Tensor, "T"]

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> TreeShape:
        """Reads it off a forest, whose nodes lie depth first."""
        nodes = forest.nodes
        ends = [node.start + node.length for node in nodes]
        for index in reversed(range(len(nodes))):
            if (parent := nodes[index].parent) >= 0:
                ends[parent] = max(ends[parent], ends[index])
        lengths = [node.length for node in nodes]
        # Kernels for GPUs take pieces of any length at once, those for CPUs only equal ones.
        equal = [list(run) for _, run in itertools.groupby(lengths)]
        runs = equal if device.type == "cpu" else [lengths]
        parts, start = [], 0
        for run in runs:
            own = slice(start, start := start + sum(run))
            parts.append(_part(own, own, run, run, True, device))
        for node, length, end in zip(nodes, lengths, ends, strict=True):
            start, stop = node.start, node.start + length
            if end > stop:
                below = slice(stop, end)
                parts.append(
                    _part(below, slice(start, stop), [end - stop], [length], False, device)
                )
        return cls(
            tuple(parts),
            tuple(
                slice(node.start, end)
                for node, end in zip(nodes, ends, strict=True)
                if node.parent < 0
            ),
            torch.from_numpy(np.repeat(np.asarray(ends, np.int64), lengths)).to(device),
        )


def _part(
    queries: slice,
    keys: slice,
    query_lengths: list[int],
    key_lengths: list[int],
    causal: bool,
    device: torch.device,
) -> Part:
    def offsets(lengths: list[int]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)

    return Part(
        queries,
        keys,
        causal,
        offsets(query_lengths),
        offsets(key_lengths),
        max(query_lengths),
        max(key_lengths),
    )


# ------------------------------------------------------------------ attention


def tree_attention(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "T K D"],
    value: Float[Tensor, "T K D"],
    shape: TreeShape,
    scale: float | None = None,
) -> Float[Tensor, "T H D"]:
    """Attends over a forest.

    Args:
        query: Packed queries of H heads, a multiple of K.
        key: Packed keys.
        value: Packed values.
        shape: The forest.
        scale: Of the scores; 1 / sqrt(D) by default.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # As the stock attention function does, which is on autocast's list.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not _reports_lse(query, key, value):
        return masked_attention(query, key, value, shape, scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _TreeAttention.apply(query, key, value, shape, scale)
    return out


def masked_attention(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "T K D"],
    value: Float[Tensor, "T K D"],
    shape: TreeShape,
    scale: float | None = None,
) -> Float[Tensor, "T H D"]:
    """The same by a mask over each tree: right on any device, but its work grows quadratically."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for tree in shape.trees:
        q, k, v = (x[tree].transpose(0, 1)[None] for x in (query, key, value))
        if groups > 1:
            # With a mask, kernels that know grouped heads are the slowest.
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        tokens = torch.arange(tree.start, tree.stop, device=query.device)
        mask = (tokens <= tokens[:, None]) & (tokens[:, None] < shape.seen_until[tree])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _reports_lse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.device.type == "cpu":
        return True
    # Stock attention pads odd head sizes first; AMD's kernels have another layout.
    if query.device.type != "cuda" or torch.version.hip or query.shape[-1] % 8:
        return False
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return torch.backends.cuda.can_use_flash_attention(
        torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    )


class _TreeAttention(torch.autograd.Function):
    """Partial attentions put together. Log-sum-exps have shape (H, T)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shape: TreeShape, scale: float
    ) -> Tensor:
        # Results of low precision are put together in single precision, and rounded once.
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(query.shape, dtype=wide)
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=wide)
        for part in shape.parts:
            at = part.queries
            found, found_lse = _forward(part, query[at], key[part.keys], value[part.keys], scale)
            if part.causal:
                out[at], lse[:, at] = found, found_lse
                continue
            before = lse[:, at]
            weight = torch.sigmoid(found_lse - before)
            out[at].lerp_(found.to(wide), weight.T[..., None])
            lse[:, at] = torch.logaddexp(before, found_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.shape, ctx.scale = shape, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, dtype=lse.dtype) for x in (query, key, value))
        for part in ctx.shape.parts:
            at, seen = part.queries, part.keys
            found = _backward(
                part, grad[at], query[at], key[seen], value[seen], out[at], lse[:, at], ctx.scale
            )
            if part.causal:
                dq[at], dk[at], dv[at] = found
                continue
            dq[at] += found[0]
            dk[seen] += found[1]
            dv[seen] += found[2]
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


# ------------------------------------------------------------------ kernels


def _forward(
    part: Part, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """A partial result and its log-sum-exps."""
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *(_batched(x, part) for x in (query, key, value)), 0.0, part.causal, scale=scale
        )
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    out, lse, *_ = _aten._flash_attention_forward(
        query,
        key,
        value,
        part.query_offsets,
        part.key_offsets,
        part.max_queries,
        part.max_keys,
        0.0,
        part.causal,
        False,
        scale=scale,
    )
    return out, lse


def _backward(
    part: Part,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """A part's share of the gradients, from the whole result and its log-sum-exps."""
    if query.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_batched(x, part) for x in (grad, query, key, value, out)),
            lse.unflatten(1, (part.pieces, -1)).transpose(0, 1),
            0.0,
            part.causal,
            scale=scale,
        )
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in gradients)
    # Without dropout the state of the random numbers is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients = _aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        lse.contiguous(),
        part.query_offsets,
        part.key_offsets,
        part.max_queries,
        part.max_keys,
        0.0,
        part.causal,
        state,
        torch.empty(0, device=query.device),
        scale=scale,
    )
    return tuple(gradients)


def _batched(x: Tensor, part: Part) -> Tensor:
    """(pieces, heads, tokens, D), without a copy."""
    return x.unflatten(0, (part.pieces, -1)).transpose(1, 2)
