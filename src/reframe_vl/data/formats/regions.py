"""Questions that are made of boxes, by template: how many, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reframe_vl.data.formats.choices import Choice, choose
from reframe_vl.data.formats.rows import Refused, kept
from reframe_vl.data.record_parts import AnswerInfo, AuditEntry, LabelledBox
from reframe_vl.types import Box

_COUNT = 'How many objects of the kind "{}" are in the image?'
WHERE_QUESTION = "In which part of the image is the middle of this: {}"
_PARTS = (
    "top left",
    "top middle",
    "top right",
    "middle left",
    "centre",
    "middle right",
    "bottom left",
    "bottom middle",
    "bottom right",
)


@dataclass(frozen=True)
class Count:
    """The question how many objects of a kind there are.

    Attributes:
        boxes: One an object.
        notes: What is odd about them.
    """

    question: str
    answer: AnswerInfo
    boxes: tuple[LabelledBox, ...]
    notes: tuple[AuditEntry, ...]


def count_question(label: str, boxes: Sequence[Box], unsure: int = 0) -> Count:
    """Asks for the number of objects.

    Args:
        unsure: So many of them are marked as hard to recognise: the number without them counts as
            right too.

    Raises:
        Refused: The kind has no name.
    """
    if not label.strip():
        raise Refused("no_label", "the objects have no class name. Name it, or leave them out.")
    sure = len(boxes) - unsure
    notes = []
    if len(set(boxes)) < len(boxes):
        notes.append(kept("repeated_box", f"two boxes of the kind {label.strip()!r} are the same"))
    if unsure:
        notes.append(kept("difficult", f"{unsure} of {len(boxes)} objects are marked difficult"))
    return Count(
        question=_COUNT.format(label.strip()),
        answer=AnswerInfo(
            kind="number",
            value=str(len(boxes)),
            aliases=(str(sure),) if 0 < sure < len(boxes) else (),
        ),
        boxes=tuple(LabelledBox(xyxy=box, label=label.strip()) for box in boxes),
        notes=tuple(notes),
    )


def where_question(text: str) -> str:
    """Asks where something is.

    Raises:
        Refused: The text is empty.
    """
    if not text.strip():
        raise Refused("empty_question", "the row describes nothing. Leave it out.")
    return WHERE_QUESTION.format(text.strip())


def where_answer(box: Box, size: tuple[int, int]) -> Choice:
    """Says in which of nine equal parts of the image the box has its middle."""
    column, row = (
        # Boxes that are not fitted to the image yet may lie anywhere.
        min(2, int(3 * min(max(low / 2 + high / 2, 0), side) / side))
        for low, high, side in ((box[0], box[2], size[0]), (box[1], box[3], size[1]))
    )
    return choose(_PARTS, 3 * row + column)
