"""The sizes of a model, from its settings alone: it is made without weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3_5Config

from reframe_vl.policy.loading import LoRASettings, with_adapters

_OFFLINE = {
    # Without the hub: transformers' own defaults are this model's, but for the tower's last layer.
    "Qwen/Qwen3.5-9B": lambda: Qwen3_5Config(vision_config={"out_hidden_size": 4096}),
}


@dataclass(frozen=True)
class Shape:
    """A model in numbers.

    Attributes:
        parameters: All of them.
        trained: Those that are trained.
        vision: Those of the vision tower.
        vision_trained: Those of them that are trained.
        outside: Parameters outside of the layers: embeddings, head, norms.
        outside_trained: Those of them that are trained.
        largest_layer: Parameters of the largest layer.
        layers: Decoder layers.
        hidden: Width of the decoder.
        intermediate: Width of its feed-forward part.
        attention_width: Queries, keys, values and output of an attention layer, together.
        vocabulary: Rows of the head.
        kv_numbers: Numbers that the cache keeps for each token.
        state_numbers: Numbers that it keeps for each sequence, whatever its length.
    """

    parameters: int
    trained: int
    vision: int
    vision_trained: int
    outside: int
    outside_trained: int
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    attention_width: int
    vocabulary: int
    kv_numbers: int
    state_numbers: int


def shape_of(path: str, lora: LoRASettings | None = None, freeze_vision: bool = False) -> Shape:
    """Makes the model on the meta device and counts.

    Args:
        path: A checkpoint folder, or a name on the model hub.
        lora: Adapters are trained instead of the weights.
        freeze_vision: The vision tower is not trained.

    Raises:
        OSError: There are no settings at the path, and the model is not one that is known.
    """
    config = _config(path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
        whole: Any = with_adapters(model, lora) if lora is not None else model
    tower, decoder = model.model.visual, model.model.language_model
    if freeze_vision:
        tower.requires_grad_(False)
    text = config.get_text_config()
    inside = [*decoder.layers, *tower.blocks]
    parts = [p for part in inside for p in part.parameters()]
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    full = sum(kind != "linear_attention" for kind in kinds)
    heads = text.num_key_value_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    everything = list(whole.parameters())
    return Shape(
        parameters=_count(everything),
        trained=_count(everything, trained=True),
        vision=_count(tower.parameters()),
        vision_trained=_count(tower.parameters(), trained=True),
        outside=_count(everything) - _count(parts),
        outside_trained=_count(everything, trained=True) - _count(parts, trained=True),
        largest_layer=max(_count(layer.parameters()) for layer in decoder.layers),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        attention_width=2 * size * (text.num_attention_heads + heads),
        vocabulary=text.vocab_size,
        kv_numbers=2 * full * heads * size,
        state_numbers=(len(kinds) - full) * _linear_state(text),
    )


def _config(path: str) -> Any:
    if path in _OFFLINE:
        return _OFFLINE[path]()
    return AutoConfig.from_pretrained(path)


def _linear_state(text: Any) -> int:
    """Numbers of a linear-attention layer's state."""
    if not hasattr(text, "linear_num_value_heads"):
        return 0
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    recurrent: int = values * text.linear_key_head_dim
    return recurrent + (2 * keys + values) * text.linear_conv_kernel_dim


def _count(parameters: Iterable[nn.Parameter], trained: bool = False) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad or not trained)
