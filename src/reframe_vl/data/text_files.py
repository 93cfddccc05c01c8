"""Text files as people have them: with and without a byte-order mark, of Windows too."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

_MARKS = {
    # The first that fits counts: UTF-32's begins with UTF-16's.
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def text_encoding(path: Path) -> str:
    """The encoding that a file's byte-order mark tells; UTF-8 where it has none."""
    with path.open("rb") as stream:
        head = stream.read(4)
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8-sig")


def iter_json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, UTF-8 text) of each line that is not blank.

    A byte-order mark is dropped. What cannot be decoded is left for the reader to find.
    """
    encoding = text_encoding(path)
    lines = _utf8_lines(path) if encoding == "utf-8-sig" else _wide_lines(path, encoding)
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line


def _utf8_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield stream.readline().removeprefix(codecs.BOM_UTF8)
        yield from stream


def _wide_lines(path: Path, encoding: str) -> Iterator[bytes]:
    with path.open(encoding=encoding, errors="surrogatepass", newline="\n") as stream:
        try:
            for line in stream:
                yield line.encode(errors="surrogatepass")
        except UnicodeDecodeError as error:
            # The rest, which is no UTF-8 either.
            yield error.object[error.start :] + b"\xff"
