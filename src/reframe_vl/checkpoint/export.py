"""Writes a policy as a checkpoint folder that transformers, vLLM and ``load_policy`` read."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor

from reframe_vl.checkpoint.card import CARD
from reframe_vl.checkpoint.folder import HEAD
from reframe_vl.checkpoint.writing import written_whole
from reframe_vl.policy.loading import Policy
from reframe_vl.policy.sharding import full, gathered, pushed

AdapterForm = Literal["merged", "separate"]

_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_ADAPTER = "adapter"


def export_policy(
    policy: Policy,
    folder: Path,
    card: str | None = None,
    *,
    adapter: AdapterForm = "merged",
    dtype: torch.dtype | None = None,
    writes: bool = True,
) -> None:
    """Writes weights, tokenizer, processor settings and chat template.

    An older folder is replaced whole, once the new one is complete. Where the policy's parameters
    are spread over ranks, all of them call this together, and one writes.

    Args:
        policy: The policy; it is not changed.
        folder: Where to write.
        card: The model card, if there is to be one.
        adapter: ``merged``: the base with the adapters in its weights, computed in float32 and cast
            last, and beside it the adapter itself in the folder ``adapter``. ``separate``: the
            adapter alone.
        dtype: Of the weights; None is what the policy computes in.
        writes: Whether this rank writes.

    Raises:
        OSError: It could not be written; an older folder is as it was.
        ValueError: There is no adapter to write separately, or a value is not finite in the dtype.
    """
    model = policy.model.model
    adapted = isinstance(model, PeftModel)
    if adapter == "separate" and not adapted:
        raise ValueError(
            f"{policy.path} was trained without adapters: write it with adapter=merged."
        )
    dtype = dtype or policy.model.dtype
    trained = _on_cpu(pushed(policy.model), writes) if adapted else {}
    weights = {} if adapter == "separate" else _on_cpu(_plain_tensors(policy, dtype), writes)
    if not writes:
        return
    with _told_of(folder), written_whole(folder) as part:
        part.mkdir()
        if adapted:
            place = part if adapter == "separate" else part / _ADAPTER
            peft: Any = model
            peft.save_pretrained(place, selected_adapters=[peft.active_adapter], state_dict=trained)
        if weights:
            _empty_copy(policy, dtype).save_pretrained(part, state_dict=weights)
        policy.tokenizer.save_pretrained(part)
        for name in _PROCESSOR_FILES:
            source = policy.folder and policy.folder / name
            if source and source.is_file():
                shutil.copy(source, part / name)
        if card is not None:
            (part / CARD).write_text(card)


@contextmanager
def _told_of(folder: Path) -> Iterator[None]:
    """A full disk is an error of the system's, whoever meets it: safetensors has one of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"{folder} could not be written ({error}): make room on its disk, and do it again."
        ) from error


def _on_cpu(tensors: Iterator[tuple[str, Tensor]], kept: bool) -> dict[str, Tensor]:
    """All tensors in the CPU's memory; a rank that keeps none goes through them all the same."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if kept:
            found[name] = tensor.cpu()
    return found


def _plain_tensors(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model without adapters, which are merged in one layer at a time."""
    base: Any = policy.model.base
    tied = bool(base.config.tie_word_embeddings)
    model = policy.model.model
    named = _merged(model) if isinstance(model, PeftModel) else gathered(base)
    for name, tensor in named:
        # Gathered from ranks, a tied head is a tensor of its own.
        if tied and name == HEAD:
            continue
        cast = tensor.to(dtype)
        if not cast.isfinite().all():
            raise ValueError(
                f"{name} of the policy that began as {policy.path} is not finite in {dtype}: look "
                "for NaN in the checkpoint and in what the run logged, or give another dtype."
            )
        yield name, cast


def _merged(peft: Any) -> Iterator[tuple[str, Tensor]]:
    base, layers = peft.get_base_model(), dict(peft.get_base_model().named_modules())
    adapter = peft.active_adapter
    for name, stored in base.state_dict().items():
        if "lora_" in name:
            continue
        module, _, kind = name.partition(".base_layer.")
        tensor = full(stored)
        if kind == "weight":
            layer: Any = layers[module]
            a, b = (full(side[adapter].weight).float() for side in (layer.lora_A, layer.lora_B))
            change = (b @ a) * layer.scaling[adapter]
            tensor = tensor.float() + change
        yield f"{module}.{kind}" if kind else name, tensor


def _empty_copy(policy: Policy, dtype: torch.dtype) -> Any:
    """A model of the policy's kind without weights: it knows how files are named and split."""
    base: Any = policy.model.base
    config = copy.deepcopy(base.config)
    with torch.device("meta"):
        made = type(base)(config)
    made.to(dtype)
    made.generation_config = base.generation_config
    return made
