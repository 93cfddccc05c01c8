"""Short answers as text: what is mere dress (markup, case, articles) and what is content."""

from __future__ import annotations

import re
import unicodedata

_MARKS = ("***", "**", "*", "___", "__", "_", "```", "``", "`", "~~")
_OPENING_MARK = re.compile(r"(?<!\w)(?:[*_`]|~~)")
_CLOSING_MARK = {mark: re.compile(rf"(?<=\S){re.escape(mark)}(?!\w)") for mark in _MARKS}
_LATEX_TEXT = re.compile(r"\\(?:boxed|text|textbf|mathbf|mathrm|mbox)\s*\{([^{}]*)\}")
_LEAD_IN = re.compile(
    r"^(?:so,?\s+)?(?:(?:the|my)\s+)?(?:(?:final|correct|best|right)\s+)?answer\s*"
    r"(?:is\b\s*:?|:|=)\s*",
    re.IGNORECASE,
)
# "A B" and "the A team" name something by a letter: there the article may be that letter.
_ARTICLE = re.compile(r"^(?:the (?!an? |the )|an? (?!the )(?=[^\W\d]{2}))(?=\S)")
_MEANINGFUL = frozenset("%#@&")
_BETWEEN_DIGITS = frozenset(".,:/-")
_MAX_LAYERS = 20


def plain(text: str) -> str:
    r"""NFKC with one minus sign, but a superscript stays one: ``10²`` is not ``102``.

    >>> plain("10² \u2212 \uff15")
    '10^2 - 5'
    """
    kept = "".join(
        "^" + char if unicodedata.decomposition(char).startswith("<super>") else char
        for char in text
    )
    folded = unicodedata.normalize("NFKC", kept)
    return re.sub("[\u2212\u2010-\u2014]", "-", folded).strip()


def strip_markup(text: str) -> str:
    r"""``plain`` without Markdown emphasis, dollar signs around all of it and LaTeX text boxes.

    >>> strip_markup("**Answer:** `7`"), strip_markup("$\\boxed{D}$"), strip_markup("2*3*4")
    ('Answer: 7', 'D', '2*3*4')
    """
    text = plain(text)
    # Text nested in thousands of layers is no short answer, and each layer is a pass over it.
    for _ in range(_MAX_LAYERS):
        inner = _LATEX_TEXT.sub(r"\1", _strip_emphasis(text))
        inner = re.sub(r"^(\$\$?)([^$]+)\1$", r"\2", inner)
        inner = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", inner, flags=re.DOTALL).strip()
        if inner == text:
            break
        text = inner
    return text


def _strip_emphasis(text: str) -> str:
    """Drops pairs of marks around something, the outermost pairs only.

    Where no mark of a kind closes, none does further on: so each kind is looked for in vain once,
    and the time is linear, which it is not for one pattern of both marks.
    """
    kept: list[str] = []
    copied = position = 0
    unclosed: set[str] = set()
    while opening := _OPENING_MARK.search(text, position):
        start = opening.start()
        position = start + 1
        for mark in _MARKS:
            inner = start + len(mark)
            begins = text.startswith(mark, start) and not text[inner : inner + 1].isspace()
            if not begins or mark in unclosed:
                continue
            if closing := _CLOSING_MARK[mark].search(text, inner + 1):
                kept += text[copied:start], text[inner : closing.start()]
                copied = position = closing.end()
                break
            unclosed.add(mark)
    return "".join([*kept, text[copied:]])


def strip_lead_in(text: str) -> str:
    """Drops "Answer:", "The final answer is" and the like from the front.

    >>> strip_lead_in("The answer is: 7"), strip_lead_in("answering machine")
    ('7', 'answering machine')
    """
    return _LEAD_IN.sub("", text, count=1)


def normalise(text: str) -> str:
    """The form in which short answers are compared, whole against whole.

    Markup, case, an article in front, white space and punctuation go; a sign, point, comma, colon
    or slash of a number stays, as do symbols that carry meaning (``%``, ``+``, currency) and the
    minus of a grade (``A-``).

    >>> normalise("The **red-brown** Dog!"), normalise("-3.50."), normalise("a")
    ('red brown dog', '-3.50', 'a')
    >>> normalise("Vitamin A"), normalise("The blood group is A-.")
    ('vitamin a', 'blood group is a-')
    """
    text = strip_markup(text).casefold()
    kept = "".join(_kept(text, i) for i in range(len(text)))
    return _ARTICLE.sub("", " ".join(kept.split()))


def _kept(text: str, i: int) -> str:
    char = text[i]
    if char in _MEANINGFUL or (unicodedata.category(char)[0] not in "PC" and char != "`"):
        return char
    before, after = text[i - 1 : i], text[i + 1 : i + 2]
    if char in _BETWEEN_DIGITS and after.isdigit():
        signs = char in "-." and not before.isalnum()
        if before.isdigit() or signs:
            return char
    if char == "-" and _is_mark_of_a_letter(text, i):
        return char
    return "" if char in "'\u2019" else " "


def _is_mark_of_a_letter(text: str, i: int) -> bool:
    alone = text[i - 1 : i].isalpha() and (i == 1 or text[i - 2] in ' \n\t("')
    return alone and (i + 1 == len(text) or text[i + 1] in ' \n\t.,;:!?)"')
