"""Decodes JSON that a policy wrote: any text is either a plain value or a refusal."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from reframe_vl.tools.base import Reason, Refusal

MAX_DEPTH = 32
"""Deeper nesting is refused: no tool needs it, and whatever walks the value later is safe."""


class _NotFinite(ValueError):
    """NaN or an infinity: not JSON, though Python's decoder takes it."""


class _Duplicate(ValueError):
    """An object names a value twice."""


def decode(text: str, malformed: Reason) -> tuple[Any, str] | Refusal:
    """Decodes the first JSON value of a text.

    Args:
        text: Anything.
        malformed: The reason of the refusal where the text does not begin with a JSON value.

    Returns:
        The value and the text after it.
    """
    text = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(text)
    except _NotFinite as error:
        return Refusal(Reason.WRONG_TYPE, f"{error} is not a number that can be used.")
    except _Duplicate as error:
        return Refusal(Reason.DUPLICATE_ARGUMENT, f"{error} is given twice; give it once.")
    except json.JSONDecodeError as error:
        return Refusal(malformed, f"Not valid JSON: {error.msg} at character {error.pos}.")
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or brackets nested beyond the interpreter's stack.
        return Refusal(malformed, "Not valid JSON: a number is too long or the nesting too deep.")
    brackets = text.count("[", 0, end) + text.count("{", 0, end)
    if brackets > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        return Refusal(malformed, f"Nested more than {MAX_DEPTH} levels deep.")
    return value, text[end:]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFinite(text[:40])
    return value


def _refuse_constant(text: str) -> float:
    raise _NotFinite(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _Duplicate(ascii(next(name for name in counts if counts[name] > 1)[:40]))
    return values


def _deeper_than(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return depth == 0 or any(_deeper_than(item, depth - 1) for item in value)


_DECODER = json.JSONDecoder(
    parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_unique
)
