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
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class RowCache:
    """One rollout's cache.

    Attributes:
        layers: (keys, values) of shape (heads, length, dim) for attention layers, (convolution
            state, recurrent state) for linear-attention layers.
        length: Tokens held.
        can_be_cut: Whether the state at an earlier token can be had: not of recurrent layers.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    length: int
    can_be_cut: bool = True

    def cut(self, length: int) -> RowCache:
        """The same up to ``length`` tokens."""
        if length == self.length:
            return self
        layers = tuple((keys[:, :length], values[:, :length]) for keys, values in self.layers)
        return RowCache(layers, length)


class RoomyLayer(DynamicLayer):
    """Keys and values with room for more: a step writes its own, where others copy all of them."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Takes over what is cached already."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self._hold(keys, values, keys.shape[-2])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values, and gives all of them."""
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if end > self._key_room.shape[-2]:
            # In proportion, so that a token is copied a bounded number of times.
            more = max(_LEAST_ROOM, end // 4) + end - start
            self._hold(F.pad(self.keys, (0, 0, 0, more)), F.pad(self.values, (0, 0, 0, more)), end)
        else:
            self._hold(self._key_room, self._value_room, end)
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows, in this order."""
        self._hold(self._key_room[rows], self._value_room[rows], self.keys.shape[-2])

    def _hold(self, key_room: Tensor, value_room: Tensor, length: int) -> None:
        self._key_room, self._value_room = key_room, value_room
        self.keys, self.values = key_room[:, :, :length], value_room[:, :, :length]


_LEAST_ROOM = 32
"""Tokens."""


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
            cache.layers[index] = RoomyLayer(keys, values)
    return cache, width


def select(cache: DynamicCache, rows: Tensor) -> None:
    """Keeps the given rows of a cache made by ``stack``, in this order; repeats are allowed."""
    for layer in _layers(cache):
        if is_linear(layer):
            layer.conv_states[0] = layer.conv_states[0][rows]
            layer.recurrent_states[0] = layer.recurrent_states[0][rows]
        else:
            layer.select(rows)


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
    return RowCache(tuple(layers), length, not any(map(is_linear, _layers(cache))))


def _layers(cache: DynamicCache) -> list[Any]:
    # The two kinds of layers share no type that has their tensors.
    return list(cache.layers)
