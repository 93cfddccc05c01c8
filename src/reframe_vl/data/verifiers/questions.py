"""What verifiers are asked, and how their words are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reframe_vl.data.records import Record
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Picture, Query
from reframe_vl.rewards.answer import is_right
from reframe_vl.types import Answer

UNKNOWN = "unknown"
"""What a verifier says that cannot know."""

_FORM = "Give the answer alone, between <answer> and </answer>."
_BLIND = (
    f"You are shown nothing but these words. If they do not tell the answer, do not guess: answer "
    f"{UNKNOWN!r}. {_FORM}"
)
_SEEN = (
    f"Go by what is shown, and by nothing else. If it does not show the answer, do not guess: "
    f"answer {UNKNOWN!r}. {_FORM}"
)
_FITS = "Does what is shown above fit this description? Answer yes or no. {form}\n{claim}"
_SAME = (
    "Question: {question}\nReference answer: {reference}\nGiven answer: {given}\n"
    "Does the given answer mean the same as the reference answer? Answer yes or no. {form}"
)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A question with its right answer, in one of several forms."""

    text: str
    answer: Answer
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Record) -> Question:
        """The question of a record."""
        return cls(record.question, Answer(**dict(record.answer)), record.options)

    def rotated(self, by: int) -> Question:
        """The same question with other letters for its options."""
        if self.answer.kind != "mcq":
            return self
        count = len(self.options)
        options = tuple(self.options[(index + by) % count] for index in range(count))
        right = chr(ord("A") + (ord(self.answer.value) - ord("A") - by) % count)
        # Aliases may name options by their old letters.
        return Question(self.text, replace(self.answer, value=right, aliases=()), options)

    def query(self, pictures: tuple[Picture, ...]) -> Query:
        """Asks for the answer, from the pictures or from the text alone."""
        lettered = [f"\n{chr(65 + index)}. {text}" for index, text in enumerate(self.options)]
        wanted = _SEEN if pictures else _BLIND
        text = f"{self.text}{''.join(lettered)}\n{wanted}"
        return Query(text, pictures, self.text, self.options)


def fits(claim: str, pictures: tuple[Picture, ...]) -> Query:
    """Asks whether pictures show something."""
    return Query(_FITS.format(claim=claim, form=_FORM), pictures, claim, ("yes", "no"))


def read_answer(text: str) -> str:
    """The answer in a verifier's words; empty where it does not know."""
    blocks = _ANSWER.findall(text)
    answer = (blocks[-1] if blocks else text).strip()
    return "" if answer.strip(" .'\"").lower() == UNKNOWN else answer


def says_yes(text: str) -> bool:
    """Whether a verifier's answer is yes."""
    return read_answer(text).strip(" .'\"*").lower().startswith("yes")


def is_answered(
    asker: Asker, asked: Sequence[tuple[Question, tuple[Picture, ...]]]
) -> list[bool | None]:
    """Whether a verifier answers questions rightly; None where it gave no answer.

    Where the answer is free text and not the reference to the letter, the verifier is asked whether
    both mean the same.
    """
    replies = asker.ask([question.query(pictures) for question, pictures in asked])
    verdicts: list[bool | None] = []
    doubtful: dict[int, Query] = {}
    for number, ((question, _), reply) in enumerate(zip(asked, replies, strict=True)):
        given = "" if reply.text is None else read_answer(reply.text)
        right = bool(given) and is_right(given, question.answer, question.options) is True
        verdicts.append(None if reply.text is None else right)
        if given and not right and question.answer.kind in ("open", "span"):
            words = _SAME.format(
                question=question.text, reference=question.answer.value, given=given, form=_FORM
            )
            doubtful[number] = Query(words, (), words, ("yes", "no"))
    for number, reply in zip(doubtful, asker.ask(list(doubtful.values())), strict=True):
        verdicts[number] = None if reply.text is None else says_yes(reply.text)
    return verdicts


def is_shown(asker: Asker, asked: Sequence[tuple[str, tuple[Picture, ...]]]) -> list[bool | None]:
    """Whether pictures show what is claimed; None where the verifier gave no answer."""
    replies = asker.ask([fits(claim, pictures) for claim, pictures in asked])
    return [None if reply.text is None else says_yes(reply.text) for reply in replies]
