"""Multiple choice: options as releases write them, and the letter that an answer states."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reframe_vl.rewards.choice import letter_of, read_choice
from reframe_vl.rewards.text import plain

IN_PARENTHESES = r"\(([A-Z])\)\s*"
"""Marks options as in ``(A) red (B) blue``, on lines of their own or not."""

ON_LINES = r"(?m)^[ \t]*\(?([A-Z])[).:][ \t]*"
"""Marks options as in ``A. red`` or ``(A) red``, each on its own line."""

AFTER_SEMICOLONS = r"(?:^|;)\s*([A-Z])\.\s*"
"""Marks options as in ``A. red;B. blue; C. green``."""

_LABEL = re.compile(r"\s*\(?([A-Z])(?:\)\s*[.:]?|[.:])\s*(\S.*)", re.DOTALL)


def read_letter(text: str, options: Sequence[str] = ()) -> str | None:
    """The option that an answer states; None where it states none, or more than one.

    As ``rewards.choice.read_choice``. But a letter that stands before words of its own counts also
    where these are not the option's: benchmarks take the letter.

    >>> options = ("a red car", "a blue car")
    >>> read_letter("(B) blue", options), read_letter("A red car.", options)
    ('B', 'A')
    >>> read_letter("it is a car", options), read_letter("A or B", options)
    (None, None)
    """
    letter = read_choice(text, options) or read_choice(text)
    valid = [letter_of(i) for i in range(len(options) or 26)]
    return letter if letter in valid else None


def without_label(option: str, index: int) -> str:
    """An option without its own letter in front.

    >>> without_label("(B) the dog", 1), without_label("A. Apples.", 0), without_label("A. B", 1)
    ('the dog', 'Apples.', 'A. B')
    """
    found = _LABEL.fullmatch(plain(option))
    return found[2].strip() if found and found[1] == letter_of(index) else option.strip()


def split_options(text: str, marker: str) -> tuple[str, tuple[str, ...]]:
    """A question and the options that are written behind it; no options where none are.

    Letters must run from A without a gap. The longest run counts, of equally long ones the last:
    words before the options, and options themselves, may name letters too. What follows the last
    option on a further line is dropped: it says how to answer.

    >>> split_options("Which? (A) red (B) light blue", IN_PARENTHESES)
    ('Which?', ('red', 'light blue'))
    """
    found = list(re.finditer(marker, text))
    best: list[re.Match[str]] = []
    for start in (i for i, match in enumerate(found) if match[1] == "A"):
        run: list[re.Match[str]] = []
        for match in found[start:]:
            if match[1] == letter_of(len(run)):
                run.append(match)
        best = max(run, best, key=len)
    if len(best) < 2:
        return text.strip(), ()
    ends = [match.start() for match in best[1:]] + [len(text)]
    options = [text[match.end() : end].strip() for match, end in zip(best, ends, strict=True)]
    options[-1] = options[-1].split("\n")[0].strip()
    return text[: best[0].start()].strip(), tuple(options)
