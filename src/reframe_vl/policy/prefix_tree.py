"""Runs a model's own forward on a forest: each shared prefix once (docs/architecture.md).

Attention and Gated-DeltaNet layers fork at the end of a prefix; everything else in a decoder works
token by token and never notices. It is one ordinary forward, so gradient checkpointing, adapters
and sharded parameters work as they do without it. The layout travels as a keyword argument of the
decoder's forward; without one, layers do what they always did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from reframe_vl.policy.forest import Forest, Node
from reframe_vl.policy.tree_attention import TreeShape, tree_attention

NAME = "prefix_tree"
LAYOUT = "prefix_tree_layout"
"""The keyword argument by which a layout reaches the layers."""

_FORKS = "_runs_on_layouts"
"""Marks a forward that knows layouts."""

_MAX_PADDING = 0.25
"""Nodes that run together may be padded by this share of their tokens."""


@dataclass(frozen=True)
class Bucket:
    """Nodes of one depth that run through a linear layer as a batch, padded on the right.

    Attributes:
        nodes: Their indices in the forest.
        own: Packed indices of their tokens, shape (N, C); padding repeats the last one.
        kept: Which of ``own``, flattened, are no padding.
        parents: The parents' indices; -1 for roots.
    """

    nodes: tuple[int, ...]
    own: Int[Tensor, "N C"]
    kept: Int[Tensor, "M"]
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a forest's layers run.

    Attributes:
        forest: What runs.
        device: Where.
    """

    forest: Forest
    device: torch.device

    @cached_property
    def attention(self) -> TreeShape:
        """For attention layers."""
        return TreeShape.of(self.forest, self.device)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """For linear layers: parents before children."""
        members = _buckets(self.forest)
        return tuple(_bucket(self.forest, nodes, self.device) for nodes in members)

    @cached_property
    def order(self) -> Int[Tensor, "T"]:
        """For each packed token, its place in the buckets' kept tokens, one after the other."""
        flat = torch.cat([bucket.own.flatten()[bucket.kept] for bucket in self.buckets])
        order = torch.empty_like(flat)
        order[flat] = torch.arange(len(flat), device=self.device)
        return order


def install(language_model: nn.Module) -> bool:
    """Prepares a decoder for layouts; False where a layer of it is not known."""
    layers = list(language_model.layers)  # type: ignore[arg-type]
    if not all(hasattr(layer, "self_attn") or hasattr(layer, "linear_attn") for layer in layers):
        return False
    config: Any = language_model.config
    if config._attn_implementation not in ("sdpa", NAME):
        return False
    config._attn_implementation = NAME
    for layer in layers:
        if hasattr(layer, "linear_attn"):
            _fork_linear_attention(type(layer.linear_attn))
    return True


# ------------------------------------------------------------------ layout


def _buckets(forest: Forest) -> Iterator[list[int]]:
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, node in enumerate(forest.nodes):
        groups.setdefault((node.depth, node.leaf), []).append(index)
    for (_, leaf), members in sorted(groups.items()):
        members.sort(key=lambda i: -forest.nodes[i].length)
        yield from _split(members, forest.nodes, leaf)


def _split(members: list[int], nodes: Sequence[Node], leaf: bool) -> Iterator[list[int]]:
    """Leaves are padded a little; a node that is followed must end in its own last state."""
    chosen: list[int] = []
    tokens = 0
    for index in members:
        length = nodes[index].length
        width = nodes[chosen[0]].length if chosen else length
        padded = width * (len(chosen) + 1)
        fits = padded <= (tokens + length) * (1 + _MAX_PADDING) if leaf else length == width
        if chosen and not fits:
            yield chosen
            chosen, tokens = [], 0
        chosen.append(index)
        tokens += length
    yield chosen


def _bucket(forest: Forest, members: list[int], device: torch.device) -> Bucket:
    nodes = [forest.nodes[i] for i in members]
    columns = np.arange(nodes[0].length)
    lengths = np.array([node.length for node in nodes])
    starts = np.array([node.start for node in nodes])
    own = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    return Bucket(
        tuple(members),
        torch.from_numpy(own).to(device),
        torch.from_numpy(np.flatnonzero(columns < lengths[:, None])).to(device),
        tuple(node.parent for node in nodes),
    )


# ------------------------------------------------------------------ attention


def _attention(
    module: nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S D"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layout: Layout | None = kwargs.pop(LAYOUT, None)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("dropout"):
        raise ValueError(
            "Rollouts that share a prefix cannot have attention dropout of their own: set "
            "attention_dropout to 0 in the model's configuration."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tree_attention(q, k, v, layout.attention, kwargs.get("scaling"))[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


# ------------------------------------------------------------------ linear attention


class _ForkedCache:
    """A one-layer cache that *assigns* its states: copying in place would break autograd.

    Its layer is what a Gated-DeltaNet layer expects of transformers' caches.
    """

    record_past = True
    """Keeps the layer off its in-place kernel for single tokens."""

    def __init__(self, states: tuple[Tensor, Tensor] | None) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}
        if states is not None:
            self.conv_states[0], self.recurrent_states[0] = states

    @property
    def layers(self) -> _ForkedCache:
        """Itself for every layer."""
        return self

    def __getitem__(self, layer_idx: int) -> _ForkedCache:
        return self

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Whether a prefix has run."""
        return bool(self.recurrent_states)

    def update_conv_state(
        self, states: Tensor, layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Puts what precedes the new inputs before them, and keeps the last ones."""
        before = self.conv_states.get(0)
        if before is None:
            before = states.new_zeros(*states.shape[:-1], conv_kernel_size)
        full = torch.cat([before, states], -1)
        self.conv_states[0] = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """Keeps the state after the new inputs."""
        self.recurrent_states[0] = state
        return state


def _fork_linear_attention(kind: type[nn.Module]) -> None:
    """Lets a class of layers run on layouts.

    The class and not its layers: a copy of a layer must run with its own weights.
    """
    plain: Callable[..., Tensor] = kind.forward
    if hasattr(plain, _FORKS):
        return

    @functools.wraps(plain)
    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        layout: Layout | None = kwargs.pop(LAYOUT, None)
        if layout is None:
            return plain(self, hidden_states=hidden_states, **kwargs)
        states: dict[int, tuple[Tensor, Tensor]] = {}
        outputs = []
        for bucket in layout.buckets:
            parents = [states[p] for p in bucket.parents if p >= 0]
            cache = _ForkedCache(
                (torch.cat([c for c, _ in parents]), torch.cat([r for _, r in parents]))
                if parents
                else None
            )
            # Not by brackets: their backward pass adds one number at a time.
            own = hidden_states[0].index_select(0, bucket.own.flatten())
            own = own.unflatten(0, bucket.own.shape)
            out = plain(self, hidden_states=own, cache_params=cache)
            outputs.append(out.flatten(0, 1).index_select(0, bucket.kept))
            for row, node in enumerate(bucket.nodes):
                states[node] = (
                    cache.conv_states[0][row : row + 1],
                    cache.recurrent_states[0][row : row + 1],
                )
        return torch.cat(outputs).index_select(0, layout.order)[None]

    setattr(forward, _FORKS, True)
    kind.forward = forward
