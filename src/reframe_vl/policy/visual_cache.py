"""Keeps a frozen vision tower's outputs: an image is encoded once for all passes and steps.

Generation, old log-probs, the reference, teachers and the update all look at the same images. The
store is bounded; what was not used for longest goes first. Models with equal towers may share one.

Kernels round a little differently with what else is encoded beside an image, and after a resume the
store is empty: a resumed run then agrees with an uninterrupted one within rounding, not bit by bit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reframe_vl.types import View

Layers = tuple[Float[Tensor, "N hidden"], ...]
"""Token embeddings, then what the deep-stack layers take."""


class VisualCache:
    """Features of views by tower and content.

    Args:
        max_mb: Of all features kept.
        device: Where they are kept; None is where they were computed.
    """

    def __init__(self, max_mb: float, device: str | None = None) -> None:
        """Starts empty.

        Raises:
            ValueError: The bound is not positive.
        """
        if not max_mb > 0:
            raise ValueError(
                f"visual_cache.max_mb is {max_mb}: give a positive size, or visual_cache=null."
            )
        self.max_bytes = int(max_mb * 2**20)
        self.device = device
        self.hits = self.misses = 0
        self._bytes = 0
        self._store: OrderedDict[tuple[str, str], Layers] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> VisualCache:
        """A copied model goes on sharing the store."""
        return self

    def layers(
        self, tower: str, views: Sequence[View], encode: Callable[[Sequence[View]], list[Layers]]
    ) -> list[Layers]:
        """The features of distinct views, encoding those that are not kept.

        Args:
            tower: Names the tower's weights and precision, see ``tower_name``.
            views: Distinct views.
            encode: Runs the tower on views.
        """
        missing = [view for view in views if (tower, view.hash) not in self._store]
        self.hits += len(views) - len(missing)
        self.misses += len(missing)
        new = dict(zip((v.hash for v in missing), encode(missing) if missing else [], strict=True))
        found = [new[v.hash] if v.hash in new else self._take(tower, v.hash) for v in views]
        for name, layers in new.items():
            self._keep((tower, name), layers)
        return found

    def _take(self, tower: str, name: str) -> Layers:
        self._store.move_to_end((tower, name))
        return self._store[tower, name]

    def _keep(self, key: tuple[str, str], layers: Layers) -> None:
        # Pieces of a larger tensor would keep all of it alive.
        own = tuple(layer.detach().to(self.device, copy=True) for layer in layers)
        self._store[key] = own
        self._bytes += _size(own)
        while self._bytes > self.max_bytes:
            self._bytes -= _size(self._store.popitem(last=False)[1])


class TowerName:
    """Names a tower's weights and precision by content, hashed again only where they changed."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._versions: tuple[int, ...] = ()
        self._name = ""

    def of(self, tower: nn.Module) -> str:
        """The name, as things stand now."""
        parameters = list(tower.parameters())
        # PyTorch counts what is written into a tensor; other storage has another address.
        versions = tuple(n for p in parameters for n in (p._version, p.data_ptr()))
        if versions != self._versions:
            digest = hashlib.blake2b(digest_size=16)
            for parameter in parameters:
                digest.update(f"{parameter.dtype} {tuple(parameter.shape)}".encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            self._versions, self._name = versions, digest.hexdigest()
        device = parameters[0].device
        if torch.is_autocast_enabled(device.type):
            # Some kernels run in single precision there, whatever the weights are in.
            return f"{self._name} mixed {torch.get_autocast_dtype(device.type)}"
        return f"{self._name} {parameters[0].dtype}"


def _size(layers: Layers) -> int:
    return sum(layer.nbytes for layer in layers)
