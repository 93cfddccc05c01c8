"""Reading a multiple-choice answer: one option or none, never letters out of words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reframe_vl.rewards.text import normalise, strip_markup

_OPEN, _CLOSE = r"[(\[{\"']*", r"[)\]}\"']*"
_LONE = re.compile(rf"{_OPEN}([A-Za-z]){_CLOSE}[.,:;!]*{_CLOSE}")
_LABELLED = re.compile(r"(?:\(([A-Za-z])\)\s*[.:,-]?|([A-Za-z])\s*[).:])\s*(\S.*)", re.DOTALL)
_CONSEQUENCE = r"(?:so|therefore|thus|hence)"
_LEAD = (
    rf"(?:{_CONSEQUENCE}|but|and|then|yes|no(?=,)|wait|actually|finally|the|my|this\ is|here\ is"
    r"|(?:it|that)(?:'s|\ is|\ must\ be|\ should\ be)|correct|right|best|final|only"
    r"|most\ likely|probably"
    r"|i\ (?:think|believe|conclude|would\ say)(?:\ that)?"
    r"|i(?:'ll|'d|\ will|\ would)?\ (?:choose|pick|select|go\ with))\b,?\s"
)
# An answer is asserted by a clause in one of these forms. They are listed, rather than the ways to
# reject an option, because nobody can list those.
_MARKER = re.compile(
    rf"""(?:\A|(?<=\n)|(?<=[.!?;]\s)|(?<=[.!?;][)"']\s)|(?<=\s)(?={_CONSEQUENCE}\b)
        |(?P<within>(?<=,\s)|(?<=\s-\s)))
    [\s"'(\[*#>-]{{0,8}}
    (?P<clause>(?:(?:{_LEAD}){{0,6}}
        (?:final(?!\s(?:answer|option|choice))|answer|option|choice)\b
        (?:\s(?:is|(?:would|must|should|will)\sbe)\b)?\s?[:=]?\s?){{1,4}})""",
    re.IGNORECASE | re.VERBOSE,
)
_DECISIVE = re.compile(rf"\bfinal\b|^{_CONSEQUENCE}\b|\b(?:is|be)\b|[:=]", re.IGNORECASE)
_CORRECTS = re.compile(rf"\bfinal|^(?:{_CONSEQUENCE}|but|no|wait|actually)\b", re.IGNORECASE)
_FRESH_START = re.compile(rf"[.!?;][)\"']?\s|(?<!:)\n|,\s(?={_CONSEQUENCE}\b|but\b)", re.IGNORECASE)
_REJECTION = re.compile(
    r"\b(?:no|not|never|none|nor|neither|cannot|unless|except|other\ than|wrong|false|worst|unlike"
    r"|incorrect|invalid|mistaken?|i\ doubt|avoid|(?:un|im)(?:likely|probable|possible)"
    r"|(?:rule|ruling)[sd]?\ out|(?:reject|exclud|eliminat|discard|dismiss|refut|den[iy])\w*)\b"
    r"|n['\u2019]t\b",
    re.IGNORECASE,
)
_STATED_LETTER = re.compile(rf"{_OPEN}([A-Za-z]){_CLOSE}(?=\s?[.;!?\n])")
_NO_REJECTION = re.compile(
    r"no[.!]?|none(?:\s+of\s+(?:the\s+above|these|them))?[.!]?", re.IGNORECASE
)
_OTHER_LETTER = re.compile(
    r"(?<!\w)[A-Z](?:\)|[.:](?:\s|$)|\s*(?:,|/|\b(?:or|and)\b))|^[A-Z]$"
    r"|(?i:\b(?:or|and|option|answer|maybe|perhaps|than))\s+\(?[A-Z]\b"
)


def read_choice(text: str, options: Sequence[str] = ()) -> str | None:
    """The one option that an answer states, as a capital letter; None where it states none.

    An option is stated by its letter alone, by its whole text, or by both together if they
    agree. Where more is written, it must end in a clause that asserts it ("the answer is",
    "I choose option", "final" …), followed by such a statement. Nothing is stated where the
    sentence rejects something on the way there ("it is not …"), or where an earlier clause
    asserts another letter that the last one does not correct ("no, …", "final").

    Args:
        text: The content of the answer block.
        options: The sample's options: they tell which letters are valid. Without them any
            letter is, and a text after the letter need only not reject it or name another.

    >>> read_choice("I considered (A); final answer: **D**", ["cat", "dog", "cow", "fox"])
    'D'
    >>> read_choice("a dog", ["cat", "dog"]), read_choice("(B) dog", ["cat", "dog"])
    ('B', 'B')
    >>> read_choice("I reject option D"), read_choice("option A option D")
    (None, None)
    >>> read_choice("it is a dog"), read_choice("ABCD"), read_choice("A or B"), read_choice("")
    (None, None, None, None)
    """
    text = strip_markup(text)
    stated = _read_statement(text, options)
    if stated is not None:
        return stated
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).replace("\u2019", "'")
    markers = list(_MARKER.finditer(text))
    if not markers or not _asserts(markers[-1]):
        return None
    stated = _read_statement(text[markers[-1].end() :].strip(), options)
    earlier = {
        letter[1].upper() for m in markers[:-1] if (letter := _STATED_LETTER.match(text, m.end()))
    }
    corrects = _CORRECTS.search(markers[-1]["clause"]) is not None
    return stated if corrects or earlier <= {stated} else None


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


def _asserts(marker: re.Match[str]) -> bool:
    if marker["within"] is not None and not _DECISIVE.search(marker["clause"]):
        return False
    before = _FRESH_START.split(marker.string[: marker.end()])[-1]
    return not _REJECTION.search(re.sub(r"^\W*no,", "", before, flags=re.IGNORECASE))


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
        rejects = _REJECTION.search(labelled[3]) and not _NO_REJECTION.fullmatch(labelled[3])
        agrees = not (rejects or _OTHER_LETTER.search(labelled[3]))
    return _letter(labelled) if agrees else None
