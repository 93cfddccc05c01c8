"""Pascal VOC detection: one question for each kind of object in an image, how many there are.

One XML file an image. Corners count pixels from 1, and the last pixel belongs to the box. Objects
marked difficult may be counted or not.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from xml.etree import ElementTree

from reframe_vl.data.formats.boxes import from_inclusive
from reframe_vl.data.formats.media_folder import media_name
from reframe_vl.data.formats.regions import count_question
from reframe_vl.data.formats.rows import Number, Refused, Row, RowFields, kept, split_of
from reframe_vl.data.record_parts import PositiveWhole
from reframe_vl.data.records import MediaInfo, Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality

# Spelled out, so that the mark is kept: rows come back as they were.
_MARKS = {
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    "<".encode("utf-16-le"): "utf-16-le",
    "<".encode("utf-16-be"): "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}
_WIDE = (b"utf-16", b"utf-32", b"ucs", b"iso-10646")
"""Encodings that a file of single bytes is not in, whatever it says."""

_STATED = re.compile(rb"\s*<\?xml[^>]*?\bencoding\s*=\s*[\"']([\w.-]+)")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class _Object(RowFields):
    difficult: str
    corners: tuple[Number, Number, Number, Number]


class _Size(RowFields):
    width: PositiveWhole
    height: PositiveWhole


class Voc(Source):
    """XML files of any data set in Pascal VOC's format; give them, or their folder."""

    licence = "Annotations: as of the data set; images of Pascal VOC: Flickr's terms (unverified)."
    encoding = "bndbox: xmin, ymin, xmax, ymax, pixels from 1, the last one belongs to the box"
    suffixes = (".xml",)

    def rows(self) -> Iterator[Row | Problem]:
        """One row for each kind of object in each image."""
        for path in self.files():
            try:
                text = _decoded(path.read_bytes())
                root = _parsed(text)
            except (ElementTree.ParseError, ValueError) as error:
                message = f"{error}. Mend the file, or write it in UTF-8."
                yield Problem(str(path), "bad_xml", message)
                continue
            names = list(dict.fromkeys(_text(found, "name") for found in root.findall("object")))
            if not names:
                yield Problem(str(path), "no_object", "no object is annotated.")
            for name in names:
                yield Row(path, f"object {name!r}", {"name": name, "xml": text})

    def native(self, record: Record) -> Any:
        """The text of the file."""
        return record.raw["xml"]

    def record(self, row: Row) -> Record:
        """One record a kind of object."""
        root, name = _parsed(row.raw["xml"]), row.raw["name"]
        _check_single(root, "filename", "size", "size/width", "size/height")
        objects = [
            _object(found) for found in root.findall("object") if _text(found, "name") == name
        ]
        difficult = sum(found.difficult not in ("", "0") for found in objects)
        boxes = [from_inclusive(*found.corners) for found in objects]
        count = count_question(name, boxes, unsure=difficult)
        path = media_name(_text(root, "filename"))
        sides = {side: _text(root, f"size/{side}") for side in ("width", "height")}
        notes = list(count.notes)
        if set(sides.values()) <= {"", "0"}:
            notes.append(kept("size_unknown", "the file does not state the size of the image"))
            media = MediaInfo(path=path)
        else:
            size = _Size.model_validate(sides)
            media = MediaInfo(path=path, width=size.width, height=size.height)
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=media,
            split=split_of(row.path),
            question=count.question,
            answer=count.answer,
            boxes=count.boxes,
            notes=notes,
        )


def _decoded(content: bytes) -> str:
    """The text of a file, its byte-order mark included: by that mark, as it says, or in UTF-8.

    Raises:
        ValueError: It is in none of these.
    """
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)
    stated = _STATED.match(content)
    if encoding is None and stated is not None and not stated[1].lower().startswith(_WIDE):
        encoding = stated[1].decode()
    try:
        return content.decode(encoding or "utf-8")
    except LookupError:
        return content.decode()


@lru_cache(maxsize=1)
def _parsed(text: str) -> ElementTree.Element:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("It declares a document type, which annotations do not need")
    # The text is decoded already, so what it says of its encoding does not count.
    parser = ElementTree.XMLParser(encoding="utf-8")
    return ElementTree.fromstring(text.removeprefix("\ufeff").encode(), parser)


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _check_single(element: ElementTree.Element, *names: str) -> None:
    """Of several elements of a name the others would be left out silently."""
    for name in names:
        if len(element.findall(name)) > 1:
            raise Refused(
                "repeated_key",
                f"<{element.tag}> has several <{name}>: which of them is meant is not known. "
                "Remove the others.",
            )


def _object(element: ElementTree.Element) -> _Object:
    _check_single(element, "name", "difficult", "bndbox", *(f"bndbox/{name}" for name in _CORNERS))
    return _Object.model_validate(
        {
            "difficult": _text(element, "difficult"),
            "corners": [_text(element, f"bndbox/{corner}") for corner in _CORNERS],
        }
    )
