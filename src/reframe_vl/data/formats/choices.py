"""Multiple choice: options and the letter of the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from reframe_vl.data.formats.rows import Refused, kept
from reframe_vl.data.record_parts import AnswerInfo, AuditEntry


@dataclass(frozen=True)
class Choice:
    """The options of a question and which is right.

    Attributes:
        notes: What is odd about them.
    """

    options: tuple[str, ...]
    answer: AnswerInfo
    notes: tuple[AuditEntry, ...]


def choose(options: Sequence[str], right: int) -> Choice:
    """Makes the answer of the option with this number.

    Raises:
        Refused: There are no options to choose from, one is empty, there is none of this number,
            or another option says the same as the right one.
    """
    texts = tuple(option.strip() for option in options)
    if not 2 <= len(texts) <= len(string.ascii_uppercase):
        raise Refused("no_options", f"the row has {len(texts)} options; give 2 to 26.")
    if not all(texts):
        raise Refused("empty_option", f"an option of {list(texts)} is empty. Leave the row out.")
    if not 0 <= right < len(texts):
        raise Refused(
            "answer_not_among_options",
            f"the right option is number {right}, counted from 0, of {len(texts)}. Correct it, or "
            "leave the row out.",
        )
    if texts.count(texts[right]) > 1:
        raise Refused(
            "ambiguous_answer",
            f"the right option {texts[right]!r} stands there twice. Leave the row out.",
        )
    notes: tuple[AuditEntry, ...] = ()
    if len(set(texts)) < len(texts):
        notes = (kept("repeated_option", f"two wrong options of {list(texts)} are the same"),)
    if all(map(_has_letter, texts, string.ascii_uppercase)):
        note = f"the options {list(texts)} carry their letters, which the question adds anyway"
        notes = (*notes, kept("lettered_options", note))
    answer = AnswerInfo(kind="mcq", value=string.ascii_uppercase[right])
    return Choice(texts, answer, notes)


def _has_letter(text: str, letter: str) -> bool:
    """Whether an option begins with its own letter, as in ``A. dog`` and ``(A) dog``."""
    return re.match(rf"\(?{letter}[.:)]", text, re.IGNORECASE) is not None


def number_of_letter(letter: str) -> int:
    """The number of an option's letter, counted from 0.

    Raises:
        Refused: It is no letter.
    """
    found = string.ascii_uppercase.find(letter.strip().upper() or "?")
    if found < 0 or len(letter.strip()) != 1:
        raise Refused(
            "answer_not_among_options",
            f"the answer {letter!r} is no option's letter. Correct it, or leave the row out.",
        )
    return found


def number_of_text(text: str, options: Sequence[str]) -> int:
    """The number of the option that says this, counted from 0.

    Raises:
        Refused: None does.
    """
    texts = [option.strip() for option in options]
    if text.strip() not in texts:
        raise Refused(
            "answer_not_among_options",
            f"the answer {text!r} is none of the options {texts}. Correct it, or leave the row "
            "out.",
        )
    return texts.index(text.strip())
