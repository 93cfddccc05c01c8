"""The order in which a run goes through its data."""

from __future__ import annotations

from typing import Any

import numpy as np


class SeededOrder:
    """A permutation for each pass, by (seed, number of the pass): a position is all that resumes.

    Args:
        seed: Of the run.
    """

    def __init__(self, seed: int) -> None:
        """Nothing is drawn before it is asked for."""
        self.seed = seed
        self._drawn: tuple[int, int] | None = None
        self._order: np.ndarray[Any, np.dtype[np.int64]]

    def index(self, position: int, size: int) -> int:
        """Which of ``size`` things stands at a position, counted over all passes."""
        number, offset = divmod(position, size)
        if self._drawn != (number, size):
            self._drawn = number, size
            self._order = np.random.default_rng([self.seed, number]).permutation(size)
        return int(self._order[offset])
