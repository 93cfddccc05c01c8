"""What an adapter is, and what all adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from reframe_vl.data.evidence import (
    EVIDENCE_VERSION,
    applicability,
    box_coverage,
    expand_box,
)
from reframe_vl.data.records import ExpandedEvidence, Record
from reframe_vl.data.report import Report


class Source(Protocol):
    """Turns one published data set into records."""

    def records(self, report: Report) -> Iterator[Record]:
        """Yields records in the source's order; odd rows go to the report."""


def expand_evidence(record: Record) -> Record:
    """Fills in expanded evidence, coverage and applicability of a record of an image.

    It starts from the annotation, so that doing it again changes nothing. A record without boxes
    stays without evidence.
    """
    if not record.boxes:
        return record
    size = record.media.size
    boxes = tuple(expand_box(box.xyxy, size) for box in record.boxes)
    coverage = box_coverage(boxes, size)
    return record.model_copy(
        update={
            "evidence": ExpandedEvidence(version=EVIDENCE_VERSION, boxes=boxes),
            "coverage": coverage,
            "applicability": applicability(coverage),
        }
    )
