"""Records of small pictures, and a verifier that is told what it sees."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reframe_vl.data.records import Record
from reframe_vl.data.verifiers.base import Query, Reply
from reframe_vl.types import RGB, Box, ImageMedia


class Scripted:
    """Answers by a function of the query; None is a failure of the infrastructure."""

    def __init__(self, say: Callable[[Query], str | None], name: str = "scripted") -> None:
        self.say = say
        self.name = self.identity = name
        self.asked: list[Query] = []

    def answer(self, queries: Sequence[Query]) -> Iterator[tuple[int, Reply]]:
        # Last first: replies may come in any order.
        for number in reversed(range(len(queries))):
            self.asked.append(queries[number])
            text = self.say(queries[number])
            yield number, Reply(text) if text else Reply(None, ("down", "it is down"))


class Blank(ImageMedia):
    """A picture that nobody has to look at."""

    def __init__(self, key: str = "blank", size: tuple[int, int] = (100, 80)) -> None:
        self._key, self._size = key, size

    @property
    def key(self) -> str:
        return self._key

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        raise AssertionError("nothing is looked at here")


def record(number: int = 0, **changes: Any) -> Record:
    fields = {
        "id": f"s/{number}",
        "source": "s",
        "split": "train",
        "licence": "none",
        "raw": {"number": number},
        "modality": "image",
        "media": {"path": f"{number}.png", "width": 100, "height": 80},
        "question": f"What is number {number}?",
        "answer": {"kind": "number", "value": str(number)},
        "boxes": [{"xyxy": [10, 20, 30, 40]}],
    }
    return Record.model_validate(fields | changes)
