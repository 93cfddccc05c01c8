"""Lets a torchvision that was built for CUDA be imported beside a torch that was not.

Its compiled operators cannot be loaded then, and its import fails on what it registers for two of
them. Their schemas, declared before, let the rest work. A ``.pth`` file of the environment loads
this at start-up, since an engine's own processes need it too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators when torchvision is first looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            # Declarations live as long as the object that made them.
            self.library = library
        return importlib.util.find_spec("torchvision")


FINDER = DeclareOperators()
sys.meta_path.insert(0, FINDER)
