"""COCO detection: one question for each kind of object in an image, how many there are.

One file (``instances_….json``) has ``images``, ``categories`` and ``annotations``. The question is
made by template; its evidence is the box of every object of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reframe_vl.data.formats.coco_files import ENCODING, coco_rows, counted
from reframe_vl.data.formats.rows import Row, split_of
from reframe_vl.data.records import Record
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.base import Source
from reframe_vl.types import Modality


class Coco(Source):
    """Any file of COCO's detection format."""

    licence = "Annotations: CC BY 4.0; images: Flickr's terms of use (both unverified)."
    encoding = ENCODING
    suffixes = (".json",)

    def rows(self) -> Iterator[Row | Problem]:
        """One row for each kind of object in each image."""
        for path in self.files():
            yield from coco_rows(path, _count_all)

    def record(self, row: Row) -> Record:
        """One record a row."""
        media, count = counted(row)
        return self.draft(
            row,
            modality=Modality.IMAGE,
            media=media,
            split=split_of(row.path),
            question=count.question,
            answer=count.answer,
            boxes=count.boxes,
            notes=count.notes,
        )


def _count_all(annotation: dict[str, Any], category: dict[str, Any]) -> None:
    return None
