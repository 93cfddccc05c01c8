"""A bounded store of decoded frames: the rollouts of a group ask for the same ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from reframe_vl.types import RGB


class DecodedFrames:
    """A bounded store of frames, safe with threads: the least recently used leave first."""

    def __init__(self, max_bytes: int) -> None:
        """Sets the bound; 0 stores nothing."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._frames: OrderedDict[Hashable, RGB] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory held by the stored frames."""
        return self._num_bytes

    def find(self, key: Hashable) -> RGB | None:
        """A copy of the frame stored under ``key``."""
        with self._lock:
            frame = self._frames.get(key)
            if frame is None:
                return None
            self._frames.move_to_end(key)
        return frame.copy()

    def store(self, key: Hashable, frame: RGB) -> None:
        """Stores a copy of a frame, unless it alone exceeds the bound."""
        with self._lock:
            if key in self._frames or frame.nbytes > self._max_bytes:
                return
            self._frames[key] = frame.copy()
            self._num_bytes += frame.nbytes
            while self._num_bytes > self._max_bytes:
                _, oldest = self._frames.popitem(last=False)
                self._num_bytes -= oldest.nbytes
