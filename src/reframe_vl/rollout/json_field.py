"""Values that were read from JSON and know where they stood, so that a complaint can say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from reframe_vl.data.report import RecordError

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

NOT_FINITE = ("nan", "inf", "-inf")
"""How numbers that JSON does not have are written."""

REMEDY = "Restore the file from its run, or remove the line."


@dataclass(frozen=True, slots=True)
class Field:
    """A value and its place; every reader raises RecordError where the value is another.

    Attributes:
        value: As JSON gave it.
        place: File and line.
        name: Path within the line; empty for the whole line.
    """

    value: Any
    place: str
    name: str = ""

    def __getitem__(self, key: str) -> Field:
        values, name = self.exactly(dict), f"{self.name}.{key}" if self.name else key
        if key not in values:
            raise RecordError(f"{self.place}: the field {name} is missing. {REMEDY}")
        return Field(values[key], self.place, name)

    def wrong(self, wanted: str) -> NoReturn:
        """Complains of the value."""
        what = f"the field {self.name}" if self.name else "the line"
        raise RecordError(
            f"{self.place}: {what} is {ascii(self.value)[:60]}, but must be {wanted}. {REMEDY}"
        )

    def exactly(self, kind: type[T]) -> T:
        """The value as it is; true and false are no numbers."""
        if type(self.value) is not kind:
            self.wrong(f"of type {kind.__name__}")
        return self.value

    def text(self) -> str:
        """A text."""
        return self.exactly(str)

    def flag(self) -> bool:
        """True or false."""
        return self.exactly(bool)

    def whole(self) -> int:
        """A whole number."""
        return self.exactly(int)

    def number(self) -> float:
        """A number, finite or not."""
        if type(self.value) not in (float, int) and self.value not in NOT_FINITE:
            self.wrong("a number or one of " + ", ".join(NOT_FINITE))
        return float(self.value)

    def optional_number(self) -> float | None:
        """A number or null."""
        return self.optional(Field.number)

    def member(self, kind: type[E]) -> E:
        """A member of an enumeration."""
        if self.text() not in tuple(kind):
            self.wrong("one of " + ", ".join(kind))
        return kind(self.value)

    def optional(self, read: Callable[[Field], T]) -> T | None:
        """Reads the value unless it is null."""
        return None if self.value is None else read(self)

    def each(self, read: Callable[[Field], T], length: int | None = None) -> tuple[T, ...]:
        """Reads the items of a list, of a known length if one is given."""
        values = self.exactly(list)
        if length is not None and len(values) != length:
            self.wrong(f"a list of {length} items")
        return tuple(
            read(Field(value, self.place, f"{self.name}[{index}]"))
            for index, value in enumerate(values)
        )

    def named(self, read: Callable[[Field], T]) -> dict[str, T]:
        """Reads the values of an object."""
        return {key: read(self[key]) for key in self.exactly(dict)}

    def wholes(self) -> tuple[int, ...]:
        """A long list of whole numbers: a place for each item would take its time."""
        values = self.exactly(list)
        if any(type(value) is not int for value in values):
            self.wrong("a list of whole numbers")
        return tuple(values)
