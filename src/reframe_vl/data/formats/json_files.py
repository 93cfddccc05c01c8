"""JSON files read item by item: arrays, objects, and JSON lines.

A repeated key is reported: Python's decoder would keep the last value and say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from reframe_vl.data.formats.rows import Refused, Row
from reframe_vl.data.report import Problem
from reframe_vl.data.text_files import iter_json_lines

EMPTY = "the file is empty. Fetch it again, or leave it out."

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Member:
    """A key of a file's outermost object, with its value."""

    key: str
    value: Any


def first_character(path: Path) -> str:
    """The first character of a JSON file that is not blank; empty where there is none."""
    with path.open("rb") as stream:
        head = stream.read(_CHUNK)
    text = head.decode(json.detect_encoding(head), errors="replace")
    return text.removeprefix("\ufeff").lstrip()[:1]


def json_rows(path: Path) -> Iterator[Row | Problem]:
    """The objects of a file that is one array, or has one object a line."""
    return array_rows(path) if first_character(path) == "[" else line_rows(path)


def line_rows(path: Path) -> Iterator[Row | Problem]:
    """The objects of a file that has one a line."""
    if _goes_on_in_next_line(path):
        message = (
            "it is one value over many lines: give an object a line, or an array of objects alone."
        )
        yield Problem(str(path), "bad_json", message)
        return
    decoder, number = _Decoder(), 0
    for number, line in iter_json_lines(path):
        place = f"line {number}"
        try:
            yield _row(path, place, decoder.decode(line))
        except Refused as refused:
            yield refused.at(f"{path}, {place}")
    if not number:
        yield Problem(str(path), "empty_file", EMPTY)


def _goes_on_in_next_line(path: Path) -> bool:
    """Whether a file is one value over many lines, of which each would be a bad row."""
    lines = [line.strip() for _, line in islice(iter_json_lines(path), 2)]
    if (
        len(lines) < 2
        or lines[0][:1] not in (b"{", b"[")
        or lines[0][-1:] not in (b"{", b"[", b",")
    ):
        return False
    try:
        # Where the second is a row, the first was only cut off.
        return not isinstance(json.loads(lines[1]), dict)
    except (ValueError, RecursionError):
        return True


def array_rows(path: Path) -> Iterator[Row | Problem]:
    """The objects of a file that is one array; what follows a syntax error is not read."""
    for number, value in enumerate(_items(path, "["), 1):
        place = f"item {number}"
        if isinstance(value, Refused):
            yield value.at(f"{path}, {place}")
            continue
        try:
            yield _row(path, place, value)
        except Refused as refused:
            yield refused.at(f"{path}, {place}")


def members(path: Path) -> Iterator[Member | Problem]:
    """The keys and values of a file that is one object, repeated keys too.

    What follows a syntax error is not read.
    """
    key = ""
    for value in _items(path, "{"):
        if isinstance(value, Refused):
            yield value.at(f"{path}, after key {key!r}" if key else str(path))
        else:
            key = value.key
            yield value


def _row(path: Path, place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise Refused(
            "bad_row", f"a row is a JSON object, not {str(value)[:80]!r}. Mend or remove it."
        )
    return Row(path, place, value)


def _items(path: Path, opening: str) -> Iterator[Any]:
    """The values of an array, or the members of an object; a ``Refused`` in place of a bad one."""
    with path.open("rb") as stream:
        encoding = json.detect_encoding(stream.read(4))
    with path.open(encoding=encoding, newline="") as stream:
        text = _Text(stream)
        try:
            yield from text.items(opening)
        except (ValueError, RecursionError) as error:
            yield Refused(
                "bad_json", f"{error}. The file was read no further: mend it, or fetch it again."
            )


class _Decoder:
    """Decodes JSON and refuses objects that have a key twice."""

    def __init__(self) -> None:
        self._repeated: list[str] = []
        self._json = json.JSONDecoder(object_pairs_hook=self._object)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            self._repeated += sorted({key for key in keys if keys.count(key) > 1})
        return found

    def decode(self, line: bytes) -> Any:
        """The value of a line."""
        try:
            text = line.decode().strip()
            value, end = self.value(text, 0)
            if end < len(text):
                raise json.JSONDecodeError("More follows the object", text, end)
        except (ValueError, RecursionError) as error:
            raise Refused("bad_json", f"{error}. Mend or remove the line.") from error
        if isinstance(value, Refused):
            raise value
        return value

    def value(self, text: str, start: int) -> tuple[Any, int]:
        """The value that starts there, or a ``Refused`` for it, and where it ends."""
        self._repeated.clear()
        value, end = self._json.raw_decode(text, start)
        if self._repeated:
            value = Refused(
                "repeated_key",
                f"the key {self._repeated[0]!r} stands in one object twice. Remove one.",
            )
        return value, end


class _Text:
    """The text of a JSON file, read as far as it is needed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = _Decoder()
        self._read = ""
        self._at = 0

    def items(self, opening: str) -> Iterator[Any]:
        """The values of an array, or the members of an object."""
        yield from self._members(opening)
        self._at += 1
        if more := self._next():
            raise ValueError(f"More follows the end, from {more!r} on")

    def _members(self, opening: str) -> Iterator[Any]:
        self._expect(opening)
        closing = {"[": "]", "{": "}"}[opening]
        if self._next() == closing:
            return
        while True:
            if opening == "{":
                key = self._value()
                if not isinstance(key, str):
                    raise ValueError(f"A key is text, not {key!r}")
                self._expect(":")
                value = self._value()
                yield value if isinstance(value, Refused) else Member(key, value)
            else:
                yield self._value()
            if self._next() == closing:
                return
            self._expect(",")

    def _more(self) -> bool:
        # Twice as much each time, so that a long value is not begun again too often.
        rest = self._read[self._at :]
        chunk = self._stream.read(max(_CHUNK, len(rest)))
        self._read, self._at = rest + chunk, 0
        return bool(chunk)

    def _next(self) -> str:
        while True:
            while self._at < len(self._read) and self._read[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._read):
                return self._read[self._at]
            if not self._more():
                return ""

    def _expect(self, wanted: str) -> None:
        found = self._next()
        if found != wanted:
            raise ValueError(f"Expected {wanted!r} but found {found or 'the end of the file'!r}")
        self._at += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decoder.value(self._read, self._at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            # A number may go on in what was not read yet.
            if end == len(self._read) and self._more():
                continue
            self._at = end
            return value
