"""The process in which math-verify runs; ``math_check`` starts, bounds and ends it.

It is run as a file, so that it loads neither this package nor its parent's main module. Requests
and replies are JSON, one a line: ``{"reference", "answer", "seconds"}`` and ``{"equal",
"unparsed"}``. math-verify's own time limits are off: they are alarms, which work in a main thread
only and which its broad excepts may swallow. The parent ends the process instead.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import resource
import signal
import sys
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify

_MAX_MEMORY = 4 << 30
_MAX_EXPONENT = 2_000
"""Numbers that are smaller than ``10^-this`` are not compared."""

_SYMPY_ERRORS = (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError)


class _NotComparableError(Exception):
    """An expression without a definite value, such as a division by zero."""


def _parse(text: str) -> Any:
    percent = text.endswith("%")
    body = text.rstrip("%").rstrip("\\").rstrip() if percent else text
    parsed = parse(
        f"${body}$" + "%" * percent,
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return parsed[0] if parsed else None


def _smallest_exponent(expression: Any) -> int:
    """The decimal exponent of the smallest nonzero number inside an expression."""
    if isinstance(expression, sympy.MatrixBase):
        return min((_smallest_exponent(entry) for entry in expression), default=0)
    smallest = 0
    for node in sympy.preorder_traversal(expression):
        if node in (sympy.zoo, sympy.nan):
            raise _NotComparableError
        if not (isinstance(node, sympy.Expr) and node.is_number):
            continue
        try:
            size = abs(node.evalf(5))
        except _SYMPY_ERRORS:
            continue
        if size in (sympy.zoo, sympy.nan):
            raise _NotComparableError
        if size.is_Float and size != 0:
            smallest = min(smallest, math.floor(sympy.log(size, 10).evalf(5)))
    if smallest < -_MAX_EXPONENT:
        raise _NotComparableError
    return smallest


def compare(reference: str, answer: str) -> dict[str, Any]:
    """Whether two LaTeX or plain expressions are equal; what cannot be parsed equals nothing."""
    parsed = {"reference": _parse(reference), "answer": _parse(answer)}
    exponents = []
    for name, expression in parsed.items():
        if expression is None:
            return {"equal": False, "unparsed": name}
        try:
            exponents.append(_smallest_exponent(expression))
        except _NotComparableError:
            return {"equal": False, "unparsed": name}
    # math-verify rounds at fixed decimal places, which makes all tiny numbers equal: let the
    # smallest number keep six significant digits.
    shift = max(0, -min(exponents) - 1)
    equal = verify(
        parsed["reference"],
        parsed["answer"],
        float_rounding=6 + shift,
        numeric_precision=15 + shift,
        timeout_seconds=None,
    )
    return {"equal": bool(equal), "unparsed": ""}


def warm_up() -> None:
    """Compares two unequal expressions, for which sympy loads much more than for equal ones.

    Loading counts as starting: it must not use up the first item's deadline.
    """
    compare("x + 1", "2")


def main() -> None:
    """Answers requests until the input closes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    # Whatever a library prints must not mix with the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    warm_up()
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        # Should the parent be gone, nobody else ends an endless comparison.
        signal.alarm(math.ceil(request["seconds"]) + 5)
        reply = compare(request["reference"], request["answer"])
        signal.alarm(0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
