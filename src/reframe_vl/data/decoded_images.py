"""A bounded store of decoded images, so that a crop does not decode its image again."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from PIL import Image


class DecodedImages:
    """A bounded store of decoded images, safe with threads: the least recently used leave first.

    Two threads that ask for one image at the same time decode it once.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        """Forgets all images and who was decoding them."""
        self._images: OrderedDict[Hashable, Image.Image] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._decoding = [threading.Lock() for _ in range(16)]

    @property
    def num_bytes(self) -> int:
        """Memory held by the stored images."""
        return self._num_bytes

    def resize(self, max_bytes: int) -> None:
        """Sets the bound; 0 stores nothing."""
        with self._lock:
            self._max_bytes = max_bytes
            self._evict()

    def get(self, key: Hashable, decode: Callable[[], Image.Image]) -> Image.Image:
        """Returns the image stored under ``key``, decoding it where it is not there.

        The image is shared: callers must not change it.
        """
        image = self._find(key)
        if image is not None:
            return image
        with self._decoding[hash(key) % len(self._decoding)]:
            image = self._find(key)
            if image is None:
                image = decode()
                self._store(key, image)
        return image

    def _find(self, key: Hashable) -> Image.Image | None:
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def _store(self, key: Hashable, image: Image.Image) -> None:
        with self._lock:
            if _num_bytes(image) <= self._max_bytes:
                self._images[key] = image
                self._num_bytes += _num_bytes(image)
                self._evict()

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes:
            _, image = self._images.popitem(last=False)
            self._num_bytes -= _num_bytes(image)


DECODED = DecodedImages(max_bytes=256 * 2**20)
"""The store that all image files of this process share."""

if hasattr(os, "register_at_fork"):
    # A lock that another thread held at a fork would stay locked in the child for ever.
    os.register_at_fork(after_in_child=DECODED.clear)


def _num_bytes(image: Image.Image) -> int:
    return image.width * image.height * 4  # Pillow keeps RGB in four bytes a pixel.
