"""Merges checkpoints that were trained from one base into a checkpoint of the same form.

``linear`` is the weighted mean of the checkpoints. The other methods combine task vectors, that is
what training added to the base, and add the result to the base: task arithmetic (arXiv 2212.04089),
TIES (arXiv 2306.01708) and DARE (arXiv 2311.03099), as peft computes them. All of it happens tensor
by tensor, trimming included: ``density`` is kept of each tensor, not of the whole model.

Values are computed in float32 and cast last. Tensors are read, merged and written one after the
other: in memory are the working copies of one tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from peft.utils.merge_utils import dare_linear, dare_ties, task_arithmetic, ties
from torch import Tensor

from reframe_vl.checkpoint.adapter import Adapter
from reframe_vl.checkpoint.card import CARD
from reframe_vl.checkpoint.folder import (
    ADAPTER_CONFIG,
    INDEX,
    SINGLE_FILE,
    Checkpoint,
    StoredTensor,
    check_tokens,
    companions,
)
from reframe_vl.checkpoint.streaming import write_safetensors
from reframe_vl.checkpoint.writing import written_whole

logger = logging.getLogger(__name__)

METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties")
RECORD = "merge.json"
"""In the output: what was merged, and how."""

_TRIMMED = {"ties": ties, "dare_linear": dare_linear, "dare_ties": dare_ties}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class MergeSettings:
    """How checkpoints are merged.

    Attributes:
        method: One of ``METHODS``.
        weights: One for each checkpoint; None is 1 for each. ``linear`` divides them by their sum.
        density: The share of each task vector's values that TIES and DARE keep.
        seed: Of what DARE drops.
        dtype: Of the output; None keeps each of the base's tensors as it is.
    """

    method: str = "linear"
    weights: Sequence[float] | None = None
    density: float = 0.5
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuses settings that cannot be used."""
        if self.method not in METHODS:
            raise ValueError(
                f"method={self.method} is unknown: choose one of {', '.join(METHODS)}."
            )
        if not _is_number(self.density) or not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be a number above 0 and at most 1.")
        given: Any = self.weights
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if given is not None and not (is_list and all(map(_is_number, given))):
            raise ValueError(
                f"weights={given} must be a list of numbers, one for each checkpoint, as in "
                "weights=[1.0,0.5]; null is 1 for each."
            )
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(
                f"dtype={self.dtype} is unknown: choose one of {', '.join(_DTYPES)}, or null for "
                "the base's."
            )

    def weights_of(self, number: int) -> list[float]:
        """The weights of so many checkpoints.

        Raises:
            ValueError: There are more or fewer, or they cannot be used.
        """
        weights = [1.0] * number if self.weights is None else [float(w) for w in self.weights]
        if number < 1 or len(weights) != number:
            raise ValueError(
                f"There are {number} checkpoints and {len(weights)} weights: give at least one "
                "checkpoint, and one weight for each."
            )
        if not all(map(math.isfinite, weights)):
            raise ValueError(f"weights={weights} must be finite numbers.")
        if self.method == "linear" and abs(sum(weights)) < 1e-6:
            raise ValueError(f"weights={weights} add up to 0, so that they have no mean.")
        return weights


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


# ------------------------------------------------------------------ mathematics


def weighted_mean(
    tensors: Sequence[Float[Tensor, "..."]], weights: Sequence[float]
) -> Float[Tensor, "..."]:
    """The mean of tensors of one shape.

    Tensors of weight 0 play no part, and where all others are equal the first comes back bit for
    bit.
    """
    kept = [(t, w) for t, w in zip(tensors, weights, strict=True) if w]
    first, weight = kept[0]
    if all(torch.equal(first, tensor) for tensor, _ in kept[1:]):
        return first
    total = sum(w for _, w in kept)
    mean = first * (weight / total)
    for tensor, weight in kept[1:]:
        mean += tensor * (weight / total)
    return mean


def combined_change(
    changes: Sequence[Float[Tensor, "..."]],
    weights: Sequence[float],
    settings: MergeSettings,
    name: str,
) -> Float[Tensor, "..."]:
    """What the task vectors of one tensor add up to.

    DARE draws by the seed and the tensor's name, so that neither shards nor other uses of torch's
    generator change the outcome; that generator is left as it was.
    """
    weights_N = torch.tensor(weights)
    if settings.method == "task_arithmetic":
        total: Tensor = task_arithmetic(list(changes), weights_N)
        return total
    digest = hashlib.sha256(f"{settings.seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Not torch.manual_seed: it would seed the accelerators' generators too.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        warnings.filterwarnings("ignore", message="The density")
        total = _TRIMMED[settings.method](list(changes), weights_N, settings.density)
    return total


# ------------------------------------------------------------------ folders


def open_source(folder: Path, base: Checkpoint) -> Checkpoint | Adapter:
    """A checkpoint or LoRA adapter of a base, looked at without reading its weights.

    Raises:
        FileNotFoundError: The folder holds neither.
        ValueError: It does not fit the base.
    """
    check_tokens(folder, base.folder)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        return Adapter.open(folder, base)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_fits(base)
    return checkpoint


def merge_checkpoints(
    base: Path,
    checkpoints: Sequence[Path],
    output: Path,
    settings: MergeSettings,
    *,
    replace: bool = False,
    card: str | None = None,
    recorded_as: Sequence[str] | None = None,
) -> None:
    """Writes the merge of some checkpoints.

    The output has the base's names, shards, tokenizer and settings. It appears when it is complete.

    Args:
        base: The folder that all of them were trained from.
        checkpoints: Folders with a complete model or a LoRA adapter.
        output: The folder to write.
        settings: How to merge.
        replace: Whether an older output may be replaced.
        card: The model card, if there is to be one.
        recorded_as: What the record calls the checkpoints; None is their folders.

    Raises:
        FileExistsError: The output is not empty, and must not be replaced.
        FileNotFoundError: A folder lacks a file that is needed.
        ValueError: The checkpoints or settings do not fit together.
    """
    weights = settings.weights_of(len(checkpoints))
    if not replace and output.exists() and (output.is_file() or any(output.iterdir())):
        raise FileExistsError(f"{output} is not empty: give a new folder for the merge.")
    opened = Checkpoint.open(base)
    sources = [open_source(folder, opened) for folder in checkpoints]
    for folder in (base, *checkpoints):
        if output.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"output={output} lies inside {folder}, which is merged: give a folder outside of "
                "base and checkpoints."
            )
    files: dict[str, list[StoredTensor]] = {}
    for stored in opened.tensors.values():
        files.setdefault(stored.file.name, []).append(stored)
    names = {stored.name: name for name, stored in opened.tensors.items()}

    def merged(stored: str) -> Tensor:
        return _merged(names[stored], opened, sources, weights, settings)

    logger.info("Merging %d checkpoints by %s", len(sources), settings.method)
    with written_whole(output) as folder:
        folder.mkdir()
        num_bytes = 0
        for file, tensors in files.items():
            layout = {s.name: (_output_dtype(s, settings), s.shape) for s in tensors}
            num_bytes += write_safetensors(folder / file, layout, merged)
        if list(files) != [SINGLE_FILE]:
            places = {s.name: file for file, tensors in files.items() for s in tensors}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
            _write_json(folder / INDEX, index)
        for path in companions(base):
            shutil.copyfile(path, folder / path.name)
        if settings.dtype is not None:
            _set_dtype(folder / "config.json", settings.dtype)
        if card is not None:
            (folder / CARD).write_text(card)
        named = recorded_as or [str(checkpoint.absolute()) for checkpoint in checkpoints]
        record = {"weights": weights, "base": str(base.absolute()), "checkpoints": list(named)}
        _write_json(folder / RECORD, asdict(settings) | record)
    logger.info("Wrote %s", output)


def _merged(
    name: str,
    base: Checkpoint,
    sources: Sequence[Checkpoint | Adapter],
    weights: Sequence[float],
    settings: MergeSettings,
) -> Tensor:
    """One tensor of the output.

    Raises:
        ValueError: It is not a tensor of numbers that can be merged, or not finite.
    """
    stored = base.tensors[name]
    if not stored.dtype.is_floating_point:
        kept = stored.read()
        # As they are: float32 does not tell large ones apart.
        own = [source.stored(name) for source in sources]
        if any((other.read() != kept).any() for other in own if other is not None):
            raise ValueError(f"{stored.name} differs, but cannot be merged: it is {stored.dtype}.")
        return kept
    start = stored.read().float()
    if settings.method == "linear":
        result = weighted_mean([source.tensor(name, start) for source in sources], weights)
    else:
        changes = [source.change(name, start) for source in sources]
        changed = any(change.any() for change in changes)
        # Adding zeros would lose the sign of a zero.
        result = start + combined_change(changes, weights, settings, name) if changed else start
    result = result.to(_output_dtype(stored, settings))
    if not result.isfinite().all():
        raise ValueError(
            f"The merge of {stored.name} is not finite in {result.dtype}: look for NaN in the "
            "checkpoints, or give another dtype."
        )
    return result


def _output_dtype(stored: StoredTensor, settings: MergeSettings) -> torch.dtype:
    if settings.dtype is None or not stored.dtype.is_floating_point:
        return stored.dtype
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


def _set_dtype(path: Path, dtype: str) -> None:
    """Tells the output's own dtype in its settings, in nested ones too."""
    # Read part by part from the inside out.
    settings = json.loads(path.read_text(), object_hook=lambda part: _with_dtype(part, dtype))
    _write_json(path, settings | {"dtype": dtype})


def _with_dtype(part: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {key: dtype if key in ("dtype", "torch_dtype") else part[key] for key in part}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
