"""Writes a policy's weights where vLLM finds them: files in shared memory, or in a shared folder.

A file in ``/dev/shm`` is memory that two processes share: it is written once and mapped by vLLM.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.sharding import pushed

_PREFIX = "reframe-policy"
_HEAD = "lm_head.weight"


def has_adapter(model: VisionLanguageModel) -> bool:
    """Whether an adapter is trained on a frozen base: then it alone is pushed."""
    return isinstance(model.model, PeftModel)


def write_weights(model: VisionLanguageModel, folder: Path, shard_bytes: int = 2**31) -> None:
    """Writes all weights as safetensors, in what the model computes in.

    Args:
        model: The policy, without an adapter.
        folder: A new folder for them.
        shard_bytes: Size of a file, which bounds the copies that are held at once.
    """
    folder.mkdir(parents=True)
    for number, shard in enumerate(_shards(_tensors(model), shard_bytes)):
        save_file(shard, folder / f"model-{number:05d}.safetensors")


def write_adapter(model: VisionLanguageModel, folder: Path) -> None:
    """Writes the trained adapter; the base is neither read nor changed."""
    peft: Any = model.model
    peft.save_pretrained(
        folder, selected_adapters=[peft.active_adapter], state_dict=dict(pushed(model))
    )


def adapter_folder(written: Path) -> Path:
    """Where below a folder the adapter is: PEFT gives those with names of their own one each."""
    return next(written.rglob("adapter_config.json")).parent


def new_folder(parent: Path) -> Path:
    """A folder for this process's weights; those of this machine's dead processes are removed.

    Raises:
        FileNotFoundError: There is no folder ``parent``.
    """
    if not parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {parent} to hand weights over in: set "
            "rollout.engine.weights_folder to one that trainer and engine both see."
        )
    # Several machines may share the folder, and a number names another process on each.
    prefix = f"{_PREFIX}-{socket.gethostname()}"
    for old in parent.glob(f"{_PREFIX}-*"):
        owner = re.fullmatch(rf"{re.escape(prefix)}-(\d+)-[^-]+", old.name)
        if owner is None or Path(f"/proc/{owner[1]}").exists():
            continue
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))


def _tensors(model: VisionLanguageModel) -> Iterator[tuple[str, Tensor]]:
    base: Any = model.base
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    for name, tensor in pushed(model):
        if not (tied and name == _HEAD):
            yield name, tensor


def _shards(tensors: Iterator[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > most:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        held += tensor.nbytes
    if shard:
        yield shard
