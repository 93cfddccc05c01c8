"""Lets a torchvision that was built for CUDA be imported beside a torch that was not.

Its compiled operators cannot be loaded then, and its import fails on what it registers for two of
them. Processors need none of them: the schemas alone, declared before, let the rest work.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def import_torchvision() -> Any:
    """Imports torchvision, with its operators declared where they cannot be loaded.

    Returns:
        What must be kept: declarations live as long as this.
    """
    try:
        import torchvision
    except RuntimeError:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

        return library
    return None
