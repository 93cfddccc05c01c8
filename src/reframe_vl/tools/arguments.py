"""Reads the arguments of a call: converts what loses nothing, refuses the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from reframe_vl.tools.base import Reason, Refusal, kind, shown
from reframe_vl.tools.json_values import decode

_NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d{1,15})?", re.ASCII)
_LARGEST = 1e15
"""Whole numbers up to here are exact as floats, and no image or video is larger."""


def only_argument(arguments: Mapping[str, Any], tool: str, name: str) -> Any | Refusal:
    """Returns the one argument that a tool takes."""
    if unknown := [key for key in arguments if key != name]:
        return Refusal(
            Reason.UNKNOWN_ARGUMENT,
            f"{tool} has no argument {shown(str(unknown[0]))}. Its only argument is {name}.",
        )
    if name not in arguments:
        return Refusal(Reason.MISSING_ARGUMENT, f"{tool} needs the argument {name}.")
    return arguments[name]


def number_list(
    value: Any, name: str, *, integral: bool, allow_single: bool = False
) -> tuple[list[int | float], int] | Refusal:
    """Reads a list of numbers.

    Text that spells a number or a list is converted, and so is 3.0 where whole numbers are due;
    true and false are no numbers.

    Args:
        value: The argument as decoded.
        name: The argument's name, for messages.
        integral: Only whole numbers are valid.
        allow_single: A single number stands for a list of one.

    Returns:
        The numbers and how many conversions they took.
    """
    due = f"{name} must be a list of {'whole ' if integral else ''}numbers"
    items, coercions = value, 0
    if isinstance(value, str):
        decoded = decode(value, Reason.WRONG_TYPE)
        if not isinstance(decoded, Refusal) and not decoded[1].strip():
            items, coercions = decoded[0], 1
    if allow_single and _number(items, integral) is not None:
        items, coercions = [items], 1
    if not isinstance(items, list):
        return Refusal(Reason.WRONG_TYPE, f"{due}, not {kind(value)}.")
    numbers: list[int | float] = []
    for item in items:
        number = _number(item, integral)
        if number is None:
            return Refusal(Reason.WRONG_TYPE, f"{due}, but {_named(item)} is in it.")
        numbers.append(number)
        coercions += isinstance(item, str) or (integral and isinstance(item, float))
    return numbers, coercions


def _number(value: Any, integral: bool) -> int | float | None:
    """The number that a value stands for without loss, or None."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) > _LARGEST or math.isnan(value):
        return None
    if not integral:
        return float(value)
    return int(value) if value == int(value) else None


def _named(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else kind(value)
