"""Reading a multiple-choice answer: one option or none, never letters out of words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reframe_vl.rewards.text import normalise, strip_markup

_OPEN, _CLOSE = r"[(\[{\"']*", r"[)\]}\"']*"
_LONE = re.compile(rf"{_OPEN}([A-Za-z]){_CLOSE}[.,:;!]*{_CLOSE}")
_LABELLED = re.compile(r"(?:\(([A-Za-z])\)\s*[.:,-]?|([A-Za-z])\s*[).:])\s*(\S.*)", re.DOTALL)
_MARKER = re.compile(
    r"\b(?:final|(?:(?:final|correct|best|right)\s+)?(?:answer|option|choice))\b"
    r"(?:\s+(?:is|would\s+be))?\s*[:=]?",
    re.IGNORECASE,
)


def read_choice(text: str, options: Sequence[str] = ()) -> str | None:
    """The one option that an answer states, as a capital letter; None where it states none.

    An option is stated by its letter alone, by its whole text, or by both together if they
    agree. Where more is written, what follows the last "answer is", "option", "final" … counts,
    and must itself be such a statement.

    Args:
        text: The content of the answer block.
        options: The sample's options: they tell which letters are valid. Without them any
            letter is, and a text after the letter is not checked.

    >>> read_choice("I considered (A); final answer: **D**", ["cat", "dog", "cow", "fox"])
    'D'
    >>> read_choice("a dog", ["cat", "dog"]), read_choice("(B) dog", ["cat", "dog"])
    ('B', 'B')
    >>> read_choice("it is a dog"), read_choice("ABCD"), read_choice("A or B"), read_choice("")
    (None, None, None, None)
    """
    text = strip_markup(text)
    stated = _read_statement(text, options)
    if stated is not None:
        return stated
    markers = list(_MARKER.finditer(text))
    return _read_statement(text[markers[-1].end() :].strip(), options) if markers else None


def option_texts(options: Sequence[str]) -> list[str]:
    """The options in their compared form, without a letter of their own in front.

    >>> option_texts(["A. A cat", "(B) The dog", "C"])
    ['cat', 'dog', 'c']
    """
    texts = []
    for index, option in enumerate(options):
        labelled = _LABELLED.fullmatch(strip_markup(option))
        own = labelled is not None and _letter(labelled) == letter_of(index)
        texts.append(normalise(labelled[3] if labelled is not None and own else option))
    return texts


def letter_of(index: int) -> str:
    """The letter of the option at ``index``.

    >>> letter_of(3)
    'D'
    """
    return chr(ord("A") + index)


def _letter(labelled: re.Match[str]) -> str:
    return (labelled[1] or labelled[2]).upper()


def _read_statement(text: str, options: Sequence[str]) -> str | None:
    valid = [letter_of(i) for i in range(len(options) or 26)]
    if lone := _LONE.fullmatch(text):
        return lone[1].upper() if lone[1].upper() in valid else None
    texts = option_texts(options)
    wanted = normalise(text)
    if wanted and texts.count(wanted) == 1:
        return letter_of(texts.index(wanted))
    labelled = _LABELLED.fullmatch(text)
    if labelled is None or _letter(labelled) not in valid:
        return None
    if options:
        agrees = texts[valid.index(_letter(labelled))] == normalise(labelled[3])
    else:
        agrees = not re.search(r"(?<!\w)[A-Z](?:\)|[.:](?:\s|$))", labelled[3])
    return _letter(labelled) if agrees else None
