"""Writes a safetensors file tensor by tensor, so that its content need never be in memory whole.

The library's own ``save_file`` takes all tensors at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of the types that are read and written."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
) -> int:
    """Writes tensors that are made one after the other.

    Args:
        path: The file.
        layout: The type and shape of each tensor: the header comes before all values.
        tensor_of: Makes a tensor of its name.

    Returns:
        The number of bytes of all values.
    """
    # Wide types first, so that every tensor lies at a multiple of its values' size.
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            tensor = tensor_of(name)
            assert (tensor.dtype, tuple(tensor.shape)) == layout[name]
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return end
