"""The order in which a run goes through its data."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

logger = logging.getLogger(__name__)


@runtime_checkable
class Order(Protocol):
    """An order without an end; it depends on nothing but its arguments, so that it resumes."""

    def index(self, position: int, size: int) -> int:
        """Which of ``size`` things stands at a position, counted over all passes."""


class SeededOrder:
    """A permutation for each pass, by (seed, number of the pass): a position is all that resumes.

    Args:
        seed: Of the run.
        streams: Numbers above 0 that tell apart the orders of one run.
    """

    def __init__(self, seed: int, *streams: int) -> None:
        """Nothing is drawn before it is asked for."""
        self.seed, self._streams = seed, streams
        self._drawn: tuple[int, int] | None = None
        self._order: np.ndarray[Any, np.dtype[np.int64]]

    def index(self, position: int, size: int) -> int:
        """Which of ``size`` things stands at a position, counted over all passes."""
        number, offset = divmod(position, size)
        if self._drawn != (number, size):
            self._drawn = number, size
            # The streams come last: a seed that ends in zeros is the same without them.
            rng = np.random.default_rng([self.seed, number, *self._streams])
            self._order = rng.permutation(size)
        return int(self._order[offset])


class MixedOrder:
    """The order through groups of things that are drawn in given proportions.

    In a pass, as long as there are things, each group has its share, rounded so that the shares add
    up. Within a group each thing comes once before any comes again.

    Args:
        seed: Of the run.
        weights: By group, in any unit; 0 leaves a group out, whether there is such a group or not.
        groups: The group of each thing, asked for again where their number changes.
    """

    def __init__(
        self,
        seed: int,
        weights: Mapping[str, float],
        groups: Callable[[], np.ndarray[Any, np.dtype[np.object_]]],
    ) -> None:
        """Nothing is drawn before it is asked for.

        A group whose share of a pass is rounded to nothing would never be drawn: it is warned of.

        Raises:
            ValueError: A weight is no finite number of at least 0, none is above 0, a group has no
                weight, or a weight no group.
        """
        if not all(is_weight(weight) for weight in weights.values()) or not any(weights.values()):
            raise ValueError(
                f"The weights {dict(weights)}: give numbers of at least 0, one of them above 0."
            )
        self.seed, self.weights = seed, weights
        self._groups = groups
        found = set(groups())
        if unweighed := sorted(found - weights.keys()):
            raise ValueError(
                f"There is no weight for {', '.join(unweighed)}: give one for each of "
                f"{', '.join(sorted(found))}; 0 leaves one out."
            )
        if unknown := sorted(name for name in weights if weights[name] and name not in found):
            raise ValueError(
                f"There are weights for {', '.join(unknown)}, of which there is no usable record: "
                f"there are {', '.join(sorted(found))}."
            )
        self._lay(len(groups()))

    def index(self, position: int, size: int) -> int:
        """Which of ``size`` things stands at a position, counted over all passes."""
        if size != self._size:
            self._lay(size)
        number, offset = divmod(position, size)
        if number != self._drawn:
            self._draw(number)
        group = int(self._turns[offset])
        members = self._members[group]
        drawn = number * self._counts[group] + int(self._ranks[offset])
        return int(members[self._orders[group].index(drawn, len(members))])

    def _lay(self, size: int) -> None:
        groups = self._groups()
        names = sorted(set(groups))
        gone = sorted(name for name in self.weights if self.weights[name] and name not in names)
        if gone:
            logger.warning(
                "All records of %s were left out: the others are drawn in their own proportions.",
                ", ".join(gone),
            )
        if not any(self.weights[name] for name in names):
            raise ValueError(
                f"All records with a weight above 0 ({', '.join(gone)}) were left out: raise the "
                "limits that they exceed, or weigh others."
            )
        self._size, self._drawn = size, -1
        self._members = [np.flatnonzero(groups == name) for name in names]
        weights = [self.weights[name] for name in names]
        self._counts = shares(weights, size)
        _warn_of_never(names, weights, self._counts)
        self._orders = [SeededOrder(self.seed, stream + 1) for stream in range(len(names))]

    def _draw(self, number: int) -> None:
        """Whose turn it is at each position of a pass, and how often it was before in the pass."""
        self._drawn = number
        turns = np.repeat(np.arange(len(self._counts)), self._counts)
        self._turns = np.random.default_rng([self.seed, number]).permutation(turns)
        self._ranks = np.empty(self._size, np.int64)
        for group, count in enumerate(self._counts):
            self._ranks[self._turns == group] = np.arange(count)


def is_weight(weight: object) -> TypeGuard[float]:
    """Whether it is a finite number of at least 0."""
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return False
    return 0 <= weight <= sys.float_info.max


def _warn_of_never(names: Sequence[str], weights: Sequence[float], counts: Sequence[int]) -> None:
    """Each pass has the same counts: what has none in one has none in any."""
    size = sum(counts)
    expected = _exact(weights, size)
    for name, weight, exact, count in zip(names, weights, expected, counts, strict=True):
        if weight and not count:
            logger.warning(
                "No record of %s is ever drawn: by its weight of %g it has %.2g of the %d draws of "
                "a pass, which is rounded to none. Raise the weight, or make it 0.",
                name,
                weight,
                exact,
                size,
            )


def _exact(weights: Sequence[float], size: int) -> list[float]:
    largest = max(weights)  # Sums of huge numbers are not finite.
    total = math.fsum(weight / largest for weight in weights)
    return [weight / largest / total * size for weight in weights]


def shares(weights: Sequence[float], size: int) -> list[int]:
    """Splits ``size`` in proportion to weights, by largest remainders."""
    exact = _exact(weights, size)
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for index in by_remainder[: size - sum(counts)]:
        counts[index] += 1
    return counts
