"""Reads checkpoint folders tensor by tensor: names, shapes, ties and values.

Two layouts of names are read. The current one has ``model.language_model.``, ``model.visual.`` and
``lm_head.``; an older one, which transformers still writes for Qwen2.5-VL, has ``model.`` and
``visual.``. Names are compared in the current layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig

from reframe_vl.checkpoint.streaming import DTYPES
from reframe_vl.policy.hub import COMPANIONS
from reframe_vl.policy.kinship import differing_token

EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"

_BASE_ONLY = "mtp."
"""Heads for speculative decoding that transformers neither loads nor saves, so that a checkpoint
trained with it lacks them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        name: As the file has it.
        file: The file.
        dtype: From the file's header.
        shape: From the file's header.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor; it may lie in the mapped file and must not be changed."""
        # Opened anew for each tensor: an open file keeps all pages that were read in memory.
        with safe_open(self.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
            return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model's weights.

    Attributes:
        folder: The folder.
        tied: Whether the head is the embedding.
        tensors: By their names in the current layout; a tied head is not among them.
    """

    folder: Path
    tied: bool
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads the headers and no weights.

        Raises:
            FileNotFoundError: The folder lacks a file that is needed.
            ValueError: Its weights cannot be read in one sense only.
        """
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder} is no checkpoint: give a folder with config.json and safetensors files."
            )
        config = AutoConfig.from_pretrained(folder)
        if getattr(config, "quantization_config", None):
            raise ValueError(
                f"{folder} holds quantised weights, which cannot be merged: give the unquantised "
                "checkpoint."
            )
        tensors: dict[str, StoredTensor] = {}
        files, promised = _weight_files(folder)
        found = read_headers(files)
        tied = bool(config.tie_word_embeddings)
        needed = promised - {HEAD} if tied else promised
        # Otherwise one that base and checkpoints all lack would be lost without a word.
        if absent := sorted(needed - {stored.name for stored in found}):
            raise ValueError(
                f"{folder} lacks {_some(absent)}, which its {INDEX} promises: copy the checkpoint "
                "again."
            )
        for stored in found:
            name = current_name(stored.name)
            if name in tensors:
                raise ValueError(
                    f"{folder} holds {name} twice, as {tensors[name].name} and {stored.name}: "
                    "remove one of them."
                )
            tensors[name] = stored
        if tied:
            _drop_tied_head(folder, tensors)
        return cls(folder, tied, tensors)

    def check_fits(self, base: Checkpoint) -> None:
        """Checks that this is a checkpoint of the base's model.

        Raises:
            ValueError: Ties, names or shapes differ.
        """
        if self.tied != base.tied:
            one, other = (self, base) if self.tied else (base, self)
            raise ValueError(
                f"{one.folder} ties its head to the embedding and {other.folder} does not: merge "
                "checkpoints of one kind."
            )
        needed = {name for name in base.tensors if not name.startswith(_BASE_ONLY)}
        if missing := sorted(needed - self.tensors.keys()):
            raise ValueError(
                f"{self.folder} lacks {_some(missing)} of {base.folder}: give a complete "
                "checkpoint that was trained from this base."
            )
        check_known(self.folder, self.tensors, base)
        for name, stored in self.tensors.items():
            check_shape(stored, stored.shape, base.tensors[name])

    def stored(self, name: str) -> StoredTensor | None:
        """A tensor as it is; None where the base's is meant."""
        return self.tensors.get(name)

    def tensor(self, name: str, base: Tensor) -> Tensor:
        """A tensor in float32; the base's where this checkpoint lacks it."""
        return self.tensors[name].read().float() if name in self.tensors else base

    def change(self, name: str, base: Tensor) -> Tensor:
        """What training added to the base's tensor, in float32."""
        return self.tensor(name, base) - base


def current_name(name: str) -> str:
    """A tensor's name in the current layout.

    Example:
        >>> current_name("visual.merger.mlp.0.bias"), current_name("model.norm.weight")
        ('model.visual.merger.mlp.0.bias', 'model.language_model.norm.weight')
    """
    name = re.sub(r"^visual\.", "model.visual.", name)
    return re.sub(r"^model\.(?!language_model\.|visual\.)", "model.language_model.", name)


def companions(folder: Path) -> list[Path]:
    """The files that go with the weights: settings, tokenizer, processor, chat template."""
    found = [path for pattern in COMPANIONS for path in folder.glob(pattern)]
    # An index of other weights, or an adapter, would win over the new ones at the next load.
    others = (".index.json", ADAPTER_CONFIG)
    return sorted(path for path in found if not path.name.endswith(others))


def read_headers(files: Iterable[Path]) -> list[StoredTensor]:
    """All tensors of some safetensors files.

    Raises:
        ValueError: A file is damaged, or holds quantised tensors.
    """
    found = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dictionary
                    part = file.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise ValueError(
                            f"{name} in {path} is of type {part.get_dtype()}, which cannot be "
                            "merged: give an unquantised checkpoint."
                        )
                    found.append(StoredTensor(name, path, dtype, tuple(part.get_shape())))
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}): copy or save it again.") from error
    return found


def check_known(folder: Path, names: Iterable[str], base: Checkpoint) -> None:
    """Checks that the base has all tensors of these names.

    Raises:
        ValueError: It lacks some.
    """
    if unknown := sorted(set(names) - base.tensors.keys()):
        raise ValueError(
            f"{folder} has {_some(unknown)} that {base.folder} lacks: give the base that it was "
            "trained from."
        )


def check_shape(stored: StoredTensor, shape: tuple[int, ...], base: StoredTensor) -> None:
    """Checks that a tensor has the base's shape.

    Raises:
        ValueError: It has another.
    """
    if shape != base.shape:
        raise ValueError(
            f"{stored.name} of {stored.file.parent} has shape {list(shape)} and that of "
            f"{base.file.parent} {list(base.shape)}: give checkpoints of one model."
        )


def check_tokens(folder: Path, base: Path) -> None:
    """Checks that ids stand for the same tokens, where both folders have a tokenizer.

    Raises:
        ValueError: They do not.
    """
    files = [place / "tokenizer.json" for place in (folder, base)]
    if not all(file.is_file() for file in files):
        return
    own, theirs = (_tokens(file) for file in files)
    token = differing_token(own, theirs)
    if token is not None:
        raise ValueError(
            f"The token {token!r} has id {own.get(token)} in {folder} and {theirs.get(token)} in "
            f"{base}: rows of one id must mean the same. Give checkpoints with the base's "
            "tokenizer."
        )


def _weight_files(folder: Path) -> tuple[list[Path], set[str]]:
    """The files with the weights, and the names of tensors that an index says are in them."""
    single, index = folder / SINGLE_FILE, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(
            f"{folder} holds both {SINGLE_FILE} and {INDEX}: one of them is of an older save, "
            "remove it."
        )
    if single.is_file():
        return [single], set()
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} has no {SINGLE_FILE} and no {INDEX}: save the checkpoint as safetensors."
        )
    try:
        places = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{index} cannot be read ({error!r}): copy or save the checkpoint again."
        ) from error
    files = [folder / name for name in sorted(set(places.values()))]
    if absent := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}: copy the checkpoint again.")
    return files, set(places)


def _tokens(file: Path) -> dict[str, int]:
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except ValueError as error:
        # tokenizers tells it by an exception of no type of its own.
        raise ValueError(f"{file} cannot be read ({error}): copy or save it again.") from error
    vocabulary: dict[str, int] = Tokenizer.from_str(text).get_vocab()
    return vocabulary


def _drop_tied_head(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Leaves the embedding alone, whether the head, the embedding or both are stored."""
    head = tensors.pop(HEAD, None)
    if head is None:
        return
    embedding = tensors.setdefault(EMBEDDING, head)
    if embedding is not head and not torch.equal(head.read(), embedding.read()):
        raise ValueError(
            f"The settings of {folder} tie the head to the embedding, but its {HEAD} is another: "
            "set tie_word_embeddings to false in its config.json, or remove the head."
        )


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"the tensor {names[0]}"
    return f"{len(names)} tensors (first: {names[0]})"
