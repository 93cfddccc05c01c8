"""Reads checkpoints of runs, whatever strategy wrote them.

A checkpoint is one file (one process, DDP), a folder with a part from each rank (FSDP2), or a
folder in DeepSpeed's own form (ZeRO).
"""

from __future__ import annotations

import pickle
import zipfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PARTS_METADATA = ".metadata"
PROGRESS = "meta.pt"
"""In a folder with parts: all but the tensors."""

ZERO_TAG = "checkpoint"
_ZERO_LATEST = "latest"
_WRAPPERS = ("_forward_module.", "module.", "_orig_mod.")


class Form(StrEnum):
    """How a checkpoint lies on disk."""

    FILE = "file"
    PARTS = "parts"
    ZERO = "zero"


def form_of(path: Path) -> Form | None:
    """The form of a complete checkpoint; None where there is none."""
    if path.is_file():
        # A file that was cut short has no archive directory at its end.
        return Form.FILE if zipfile.is_zipfile(path) else None
    if (path / PARTS_METADATA).is_file() and (path / PROGRESS).is_file():
        return Form.PARTS
    if (path / _ZERO_LATEST).is_file() and list((path / ZERO_TAG).glob("*model_states.pt")):
        return Form.ZERO
    return None


def read_progress(path: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors, such as the step in ``epoch``.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
    """
    form = form_of(path)
    if form is None:
        raise FileNotFoundError(f"{path} is no complete checkpoint.")
    file = path
    if form is Form.PARTS:
        file = path / PROGRESS
    elif form is Form.ZERO:
        file = min((path / ZERO_TAG).glob("*model_states.pt"))
    mapped = form is not Form.PARTS
    state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=mapped, weights_only=False)
    return state


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights that a checkpoint holds, each whole, by their names in the policy.

    They are those that were trained; frozen ones are in the base.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        ImportError: The checkpoint is DeepSpeed's, which is not installed.
        ValueError: The checkpoint is damaged.
    """
    form = form_of(path)
    if form is None:
        raise FileNotFoundError(f"{path} is no complete checkpoint.")
    read = {Form.FILE: _from_file, Form.PARTS: _from_parts, Form.ZERO: _from_zero}[form]
    try:
        return {_own_name(name): value for name, value in read(path).items()}
    except pickle.UnpicklingError as error:
        # What torch advises then is to run whatever the file says.
        raise ValueError(f"{path} is damaged: give another checkpoint of the run.") from error


def part_names(path: Path) -> set[str]:
    """The names of the weights in a folder with parts."""
    return {name for name, _ in _parts(path)}


def _from_file(path: Path) -> dict[str, Tensor]:
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    weights: dict[str, Tensor] = state["state_dict"]
    return weights


def _from_parts(path: Path) -> dict[str, Tensor]:
    weights = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in _parts(path)
    }
    dcp.load({"state_dict": weights}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return weights


def _parts(path: Path) -> list[tuple[str, TensorStorageMetadata]]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    found = []
    for flat, place in metadata.planner_data.items():
        stored = metadata.state_dict_metadata[flat]
        if place[0] == "state_dict" and isinstance(stored, TensorStorageMetadata):
            found.append((str(place[1]), stored))
    return found


def _from_zero(path: Path) -> dict[str, Tensor]:
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ImportError(
            f"{path} was written by DeepSpeed, whose own converter reads it: install deepspeed "
            "(pip install 'reframe-vl[deepspeed]')."
        ) from error
    weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(path), tag=ZERO_TAG)
    return dict(weights)


def _own_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name.removeprefix("policy.")
