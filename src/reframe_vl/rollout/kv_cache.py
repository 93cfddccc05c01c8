"""Caches of single rollouts, taken out of a batched transformers cache and put together again.

Works for decoders of full-attention layers and of Gated-DeltaNet layers alike: keys and values
are stored without padding, recurrent states as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache


@dataclass(frozen=True)
class RowCache:
    """One rollout's cache.

    Attributes:
        layers: (keys, values) of shape (heads, length, dim) for attention layers, (convolution
            state, recurrent state) for linear-attention layers.
        length: Tokens held.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    length: int


def is_linear(layer: Any) -> bool:
    """Whether a transformers cache layer holds recurrent states instead of keys and values."""
    return hasattr(layer, "recurrent_states")


def empty(config: Any) -> DynamicCache:
    """A cache that holds nothing yet, for a decoder's configuration."""
    return DynamicCache(config=config)


def stack(rows: Sequence[RowCache], config: Any) -> tuple[DynamicCache, int]:
    """Puts rows into one batched cache, keys and values padded on the left.

    Returns:
        The cache and the padded length.
    """
    cache = empty(config)
    width = max(row.length for row in rows)
    for index, layer in enumerate(_layers(cache)):
        first = [row.layers[index][0] for row in rows]
        second = [row.layers[index][1] for row in rows]
        if is_linear(layer):
            convolution, recurrent = torch.stack(first), torch.stack(second)
            layer.lazy_initialization(conv_states=convolution)
            layer.lazy_initialization(recurrent_states=recurrent)
            layer.conv_states[0] = convolution
            layer.recurrent_states[0] = recurrent
            layer.has_previous_state[0] = True
        else:
            pads = [width - row.length for row in rows]
            keys = torch.stack([F.pad(k, (0, 0, p, 0)) for k, p in zip(first, pads, strict=True)])
            values = torch.stack(
                [F.pad(v, (0, 0, p, 0)) for v, p in zip(second, pads, strict=True)]
            )
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
    return cache, width


def select(cache: DynamicCache, rows: Tensor) -> None:
    """Keeps the given rows of a batched cache, in this order; repeats are allowed."""
    for layer in _layers(cache):
        if is_linear(layer):
            layer.conv_states[0] = layer.conv_states[0][rows]
            layer.recurrent_states[0] = layer.recurrent_states[0][rows]
        else:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def take(cache: DynamicCache, row: int, length: int) -> RowCache:
    """Copies one row out of a batched cache; ``length`` tokens, without its left padding."""
    layers = []
    for layer in _layers(cache):
        if is_linear(layer):
            layers.append(
                (layer.conv_states[0][row].clone(), layer.recurrent_states[0][row].clone())
            )
        else:
            # Copies, since a slice would keep the whole batch's cache alive.
            layers.append(
                (layer.keys[row, :, -length:].clone(), layer.values[row, :, -length:].clone())
            )
    return RowCache(tuple(layers), length)


def _layers(cache: DynamicCache) -> list[Any]:
    # The two kinds of layers share no type that has their tensors.
    return list(cache.layers)
