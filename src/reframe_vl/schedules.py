"""Schedules: pure functions of a run's progress ``p`` in [0, 1] (step / max_steps).

Configs name them by ``_target_``; the collector asks for their value when it generates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LINEAR_BELOW = 1e-12
"""For smaller kappa the decay differs from its limit ``1 - p`` by less than rounding does."""


def checked(progress: float) -> float:
    """Returns ``progress``, or says what is wrong with it.

    >>> checked(0.5)
    0.5
    """
    if not 0.0 <= progress <= 1.0:
        raise ValueError(
            f"progress is {progress}, but must lie in [0, 1]: pass step / max_steps, and raise "
            "max_steps where a resumed run goes on for longer."
        )
    return progress


def call_decay(progress: float, kappa: float) -> float:
    """``f(p) = (exp(-kappa p) - exp(-kappa)) / (1 - exp(-kappa))``: 1 at the start, 0 at the end.

    The larger ``kappa``, the sooner it falls; ``kappa = 0`` is its limit, the straight line.

    >>> call_decay(0.0, kappa=3.0), call_decay(1.0, kappa=3.0), call_decay(0.25, kappa=0.0)
    (1.0, 0.0, 0.75)
    """
    if not (kappa >= 0.0 and math.isfinite(kappa)):
        raise ValueError(f"kappa is {kappa}, but must be a finite number that is 0 or more.")
    left = 1.0 - checked(progress)
    if kappa < _LINEAR_BELOW:
        return left
    # The formula times exp(kappa)/exp(kappa), with expm1: no cancellation and no overflow.
    return math.exp(-kappa * progress) * math.expm1(-kappa * left) / math.expm1(-kappa)


@dataclass(frozen=True)
class CallDecay:
    """``call_decay`` with its ``kappa`` bound.

    >>> CallDecay(kappa=0.0)(0.5)
    0.5
    """

    kappa: float

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        return call_decay(progress, self.kappa)


@dataclass(frozen=True)
class Constant:
    """The same value all through.

    >>> Constant(0.5)(0.9)
    0.5
    """

    value: float

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        checked(progress)
        return self.value


@dataclass(frozen=True)
class Linear:
    """A straight line from ``start`` to ``end``.

    >>> Linear(1.0, 0.0)(0.25)
    0.75
    """

    start: float
    end: float

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        return (1.0 - checked(progress)) * self.start + progress * self.end


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave from ``start`` to ``end``: flat at both ends.

    >>> Cosine(1.0, 0.0)(0.5)
    0.5
    """

    start: float
    end: float

    def __call__(self, progress: float) -> float:
        """The value at ``progress``."""
        share = (1.0 - math.cos(math.pi * checked(progress))) / 2.0
        return (1.0 - share) * self.start + share * self.end
