"""Reading a number as people write it, and comparing two within a relative tolerance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from reframe_vl.rewards.text import strip_lead_in, strip_markup

_CURRENCY = "$€£¥₹₩₽"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*[{_CURRENCY}]?\s*(?P<sign2>[+-]?)
    (?P<digits>(?:\d{{1,3}}(?:,\d{{3}})+|\d{{1,3}}(?:\ \d{{3}})+|\d+)(?:\.\d*)?|\.\d+)
    (?P<exponent>e[+-]?\d{{1,3}})?
    \s*[{_CURRENCY}]?\s*
    (?P<scale>\b(?:thousand|million|billion|trillion)\b|(?<=[\d ])k\b)?
    \s*(?P<unit>%|°?(?:[^\W\d_]+(?:/[^\W\d_]+)?(?:\^?[23])?)?)\s*\.?""",
    re.VERBOSE,
)
_SCALES = {"": 1, "k": 10**3, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALES["trillion"] = 10**12
_PERCENT = frozenset({"%", "percent", "pct"})
_MAX_CHARS = 200


@dataclass(frozen=True)
class Quantity:
    """A number and the one word after it; percent and currency marks are no units."""

    value: Fraction
    unit: str = ""


@lru_cache(maxsize=4096)
def read_number(text: str) -> Quantity | None:
    """The number that a text is, or None where it is not exactly one number.

    Read: thousands separators (comma or space), a decimal point, an exponent of up to three
    digits, a currency mark, a percent sign, "thousand" to "trillion" and "k", and one word of
    unit. Not read: decimal commas, fractions, words, ranges, more than one number.

    >>> read_number("about 7") is None, read_number("3 or 4") is None
    (True, True)
    >>> read_number("$1,250.50").value, read_number("**12 cm**").unit
    (Fraction(2501, 2), 'cm')
    >>> read_number("5 million").value == 5_000_000
    True
    """
    # Folded first: a pattern that ignores case takes U+0130 and U+0131 for an i, and so words for
    # scales that the table does not have.
    text = strip_lead_in(strip_markup(text)).casefold()
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    sign = -1 if "-" in match["sign"] + match["sign2"] else 1
    digits = re.sub(r"[, ]", "", match["digits"])
    value = Fraction(digits.rstrip(".") + (match["exponent"] or ""))
    unit = match["unit"]
    scale = _SCALES[match["scale"] or ""]
    return Quantity(sign * scale * value, "" if unit in _PERCENT else unit)


def numbers_agree(answer: Quantity, reference: Quantity, tolerance: float = 0.0) -> bool:
    """Whether ``|answer - reference| <= tolerance * |reference|`` and the units do not clash.

    Units clash only where both are written and differ. The arithmetic is exact.

    >>> numbers_agree(Quantity(Fraction(105)), Quantity(Fraction(100)), tolerance=0.05)
    True
    >>> numbers_agree(Quantity(Fraction(5), "m"), Quantity(Fraction(5), "cm"))
    False
    """
    if answer.unit and reference.unit and answer.unit != reference.unit:
        return False
    if answer.value == reference.value:
        return True
    error = abs(answer.value - reference.value)
    return tolerance > 0 and error <= Fraction(str(tolerance)) * abs(reference.value)
