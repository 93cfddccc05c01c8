"""Loads a policy: model, tokenizer, views and codec that belong together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from reframe_vl.policy.hub import local_folder
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.views import ViewMaker
from reframe_vl.policy.visual_cache import VisualCache
from reframe_vl.tools.codec import BANNED_STRINGS, STOP_STRINGS, Codec, codec_for
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.types import Sampling


@dataclass(frozen=True)
class LoRASettings:
    """Low-rank adapters on a frozen base.

    Attributes:
        rank: Of the adapters.
        alpha: Scale; the update is alpha / rank times the product.
        dropout: On the adapters' input. Above 0 the trainer's log-probs differ from the sampler's.
        target_modules: A regular expression or names, of linear layers; None is all of the
            decoder's.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | Sequence[str] | None = None


@dataclass
class Policy:
    """A policy and what speaks for it.

    Attributes:
        path: Where it was loaded from: a folder, or a name on the model hub.
        tokenizer: The transformers tokenizer.
        codec: How its family writes turns.
        folder: Its files; None where it was not loaded from any.
    """

    model: VisionLanguageModel
    tokenizer: Any
    codec: Codec
    path: str
    folder: Path | None = None

    def sampling(self, temperature: float, max_new_tokens: int) -> Sampling:
        """The distribution its turns are drawn from: placeholder and vision tokens banned.

        Ids of the padded vocabulary that stand for nothing are banned too.
        """
        vocabulary = self.tokenizer.get_vocab()
        banned = [vocabulary[t] for t in BANNED_STRINGS if t in vocabulary]
        padded = range(len(self.tokenizer), self.model.config.text_config.vocab_size)
        stop = tuple(vocabulary[t] for t in STOP_STRINGS if t in vocabulary)
        if not stop:
            raise ValueError(f"The tokenizer of {self.path} has no end-of-turn token.")
        return Sampling(temperature, max_new_tokens, (*sorted(set(banned)), *padded), stop)


def load_policy(
    path: str | Path,
    family: str | None = None,
    dtype: str = "float32",
    lora: LoRASettings | None = None,
    freeze_vision: bool = False,
    gradient_checkpointing: bool = False,
    thinking: bool = False,
    compact_calls: bool = False,
    coordinate_frame: str | None = None,
    attention: str = "sdpa",
    visual_cache: VisualCache | None = None,
) -> Policy:
    """Loads a policy of a Qwen-VL family.

    Args:
        path: A checkpoint folder, or a name on the model hub.
        family: ``qwen3_5``, ``qwen3_vl`` or ``qwen2_5_vl``; None reads it from the checkpoint.
        dtype: Of the weights.
        lora: Train adapters instead of the weights.
        freeze_vision: Keep the vision tower as it is.
        gradient_checkpointing: Trade a second forward for memory.
        thinking: Open a think block at the start of each turn.
        compact_calls: Calls without white space.
        coordinate_frame: Overrides the family's frame of boxes.
        attention: transformers' attention implementation.
        visual_cache: Keeps the outputs of a frozen vision tower.

    Raises:
        FileNotFoundError: The folder lacks a file that is needed.
        ValueError: The checkpoint's family is not known, it lacks tensors of its model or has
            others, or adapters cannot stand where they are asked for.
    """
    path = str(path)
    folder = local_folder(path)
    config = AutoConfig.from_pretrained(folder)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention, output_loading_info=True
    )
    model, report = loaded
    _check_complete(path, report)
    # What an adapter names as its base: not the place in this machine's cache of the hub.
    model.name_or_path = path
    if lora is not None:
        model = with_adapters(model, lora)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = VisionLanguageModel(model, ViewMaker.from_pretrained(folder), visual_cache)
    if freeze_vision:
        wrapped.visual.requires_grad_(False)
    frame = CoordinateFrame(coordinate_frame) if coordinate_frame else None
    codec = codec_for(family or config.model_type, frame, thinking, compact_calls)
    return Policy(wrapped.train(), AutoTokenizer.from_pretrained(folder), codec, path, folder)


def _check_complete(path: str, report: Mapping[str, Collection[str]]) -> None:
    """Checks that all of a model came from its folder, and all of the folder went into it.

    What is missing would be drawn at random, and what has no place be left out, without a word.

    Args:
        path: The folder, or the name on the hub.
        report: Of transformers; a tied head and what a family is saved without are not in it.

    Raises:
        ValueError: They do not fit.
    """
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{path} lacks tensors of its model, {len(missing)} in all ({_some(missing)}): copy or "
            "save the checkpoint again, whole."
        )
    if unknown := sorted(report["unexpected_keys"]):
        raise ValueError(
            f"{path} holds tensors that its model has no place for, {len(unknown)} in all "
            f"({_some(unknown)}): save the checkpoint with transformers, adapters merged in, and "
            "its own config.json beside it."
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def with_adapters(model: Any, lora: LoRASettings) -> Any:
    """Freezes a model and puts low-rank adapters beside its linear layers.

    Raises:
        ValueError: A target is no linear layer, or is tied to the embedding.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    embedding = model.get_input_embeddings().weight
    # The vision tower's linear layers carry other names or sit under model.visual.
    targets = lora.target_modules or r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
        ),
    )
    # An export could not merge these, which would be told after all training.
    for name, layer in adapted.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        target = layer.get_base_layer()
        if not isinstance(target, torch.nn.Linear):
            raise ValueError(
                f"lora.target_modules={targets} takes in {name}, which is of "
                f"type {type(target).__name__}: name linear layers only."
            )
        if target.weight is embedding:
            raise ValueError(
                f"lora.target_modules={targets} takes in {name}, whose weight is the embedding's "
                "too, so an adapter would change one end of the tie alone: leave it out."
            )
    return adapted
