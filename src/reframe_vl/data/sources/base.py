"""What an adapter is, and what all adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from reframe_vl.data.evidence import (
    EVIDENCE_VERSION,
    MIN_SIDE,
    applicability,
    box_coverage,
    expand_box,
)
from reframe_vl.data.records import ExpandedEvidence, Record
from reframe_vl.data.report import Problem, Report


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


def report_small_evidence(record: Record, where: str, report: Report) -> None:
    """Notes expanded boxes that no tool call can ask for; the record is kept.

    Args:
        where: The file and line of the source's row.
    """
    for box in record.evidence.boxes if record.evidence else ():
        width, height = box[2] - box[0], box[3] - box[1]
        if min(width, height) < MIN_SIDE:
            report.add(
                Problem(
                    where,
                    "evidence_too_small",
                    f"the expanded evidence box {list(box)} has {width:.3g}x{height:.3g} pixels, "
                    f"and a tool call needs {MIN_SIDE:g} a side: no call can reach it, and the "
                    "forced-call arms of an evaluation leave the item out. Correct the row's box "
                    "if it is a slip.",
                    kept=True,
                )
            )
