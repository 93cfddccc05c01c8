"""Mathematical expressions as text: cleaned for the checker, and what algebra must not touch."""

from __future__ import annotations

import re

from reframe_vl.rewards.text import strip_lead_in, strip_markup

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infty"
_BARE_FUNCTION = re.compile(
    rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])|(?<![\\A-Za-z])sqrt(?=\{{)"
)
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|begin|end)\b)[A-Za-z]{4,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}")
_CLOCK_OR_RATIO = re.compile(r"\d\s*:\s*\d")
_TWO_NUMBERS = re.compile(r"\d(?:\s|~|\\quad|\\qquad|\\[,;: ])+\d")
_QUANTITY = re.compile(
    r"[-+]?[\d.,]+\s*(?:\\(?:text|mathrm|mbox|rm)\s*\{)?\s*([A-Za-z][\w/^]*)\s*\}?"
)


def clean_expression(text: str) -> str:
    r"""An expression without markup and lead-in, in the spelling that math-verify reads.

    >>> clean_expression("**Answer:** $1,000\\,000 + x**2$"), clean_expression("2 sin(pi x)")
    ('1,000000 + x^2', '2 \\sin(\\pi x)')
    """
    text = strip_markup(strip_lead_in(strip_markup(text)))
    text = re.sub(r"(?<=\d)\\[,!](?=\d{3}(?!\d))|\\(?:left|right)(?![a-z])", "", text)
    text = _BARE_FUNCTION.sub(lambda match: "\\" + match[0], text.replace("**", "^"))
    return " ".join(text.rstrip(" .;").split())


def is_text(expression: str) -> bool:
    """Whether something must be compared as text, since algebra would misread it.

    math-verify takes words for products of letters ("listen" = "silent"), clock times for
    quotients and "1 2" for a sum.

    >>> is_text("the answer is x"), is_text("12:30"), is_text("1 2/3"), is_text("2xy + 1")
    (True, True, True, False)
    """
    if any(pattern.search(expression) for pattern in (_CLOCK_OR_RATIO, _TWO_NUMBERS)):
        return True
    return bool(_WORD.search(_ENVIRONMENT.sub("", expression))) or "$" in expression


def units_clash(first: str, second: str) -> bool:
    r"""Whether both are a number with a unit and the units differ: math-verify drops units.

    >>> units_clash("5 cm", r"5\text{ m}"), units_clash("5 cm", "5"), units_clash("2x", "2x")
    (True, False, False)
    """
    units = [_QUANTITY.fullmatch(text) for text in (first, second)]
    return None not in units and len({match[1] for match in units if match is not None}) > 1
