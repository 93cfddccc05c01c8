"""Numbers in answers, and how near one is to the truth."""

from __future__ import annotations

import re
import sys

import numpy as np

from reframe_vl.rewards.number import read_number
from reframe_vl.rewards.text import plain

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d])")
_MAX_CHARS = 200

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""Of mean relative accuracy."""


def stated_number(text: str) -> float | None:
    """The one number that an answer states, with words around it or not.

    None too where it is larger than floats hold.

    >>> stated_number("about 3.5 metres"), stated_number("1,250"), stated_number("3 or 4")
    (3.5, 1250.0, None)
    """
    quantity = read_number(text)
    if quantity is not None:
        return float(quantity.value) if abs(quantity.value) <= sys.float_info.max else None
    found = _NUMBER.findall(plain(text)) if len(text) <= _MAX_CHARS else []
    return float(found[0].replace(",", "")) if len(found) == 1 else None


def mean_relative_accuracy(given: float, truth: float) -> float:
    """The share of thresholds θ for which ``|given - truth| / truth <= 1 - θ``.

    In floating-point numbers, as the benchmark's own code: an error of exactly 0.2 misses θ = 0.8.

    >>> [mean_relative_accuracy(given, 10) for given in (10, 7.7, 8, 0)]
    [1.0, 0.6, 0.6, 0.0]

    Raises:
        ValueError: The truth is 0: nothing is relative to it.
    """
    if truth == 0:
        raise ValueError("The true number is 0: a relative error needs another. Leave it out.")
    return float((abs(given - truth) / truth <= 1 - THRESHOLDS).mean())
