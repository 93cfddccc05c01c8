"""Windows of time, and the question that a source without questions gives of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from reframe_vl.data.formats.rows import AnyNumber, Refused, changed, kept
from reframe_vl.data.record_parts import AnswerInfo, AuditEntry, Seconds
from reframe_vl.data.validation import segment_problem

Window = Annotated[list[AnyNumber], Field(min_length=2, max_length=2)]
"""[start, end] as rows have it, in seconds; what is not finite is refused by ``segments_of``."""

MOMENT_QUESTION = "From when to when: {}"
_ANSWER = "{} to {} seconds"

_NOISE_S = 1e-6
"""So far a sum of floats may be beside the number that was meant."""

_LISTED_S = 1.0
"""Durations are listed in whole seconds at the coarsest."""


def segments_of(
    windows: Iterable[Sequence[float]], duration_s: float | None
) -> tuple[tuple[Seconds, ...], list[AuditEntry]]:
    """Checks windows against the listed duration, and says what was odd.

    A window that ends after the listed duration stays as it is, unless by more than the whole
    video: the duration is often rounded, and what lies after the real end does not count anyway.

    Raises:
        Refused: A window is empty or reversed, or does not fit the video.
    """
    segments, notes = [], []
    for start, end in windows:
        if not (math.isfinite(start) and math.isfinite(end)):
            raise Refused(
                "segment_not_finite",
                f"the window {[start, end]} has no times. Correct it, or leave the row out.",
            )
        if start == end:
            raise Refused(
                "segment_empty",
                f"the window {[start, end]} has no length. Correct it, or leave the row out.",
            )
        if end < start:
            raise Refused(
                "segment_reversed",
                f"the window {[start, end]} ends before it starts. Correct it, or leave the row "
                "out.",
            )
        if end <= 0:
            raise Refused(
                "segment_outside",
                f"the window {[start, end]} lies before the video. Correct it, or leave the row "
                "out.",
            )
        odd = segment_problem((start, end), duration_s)
        if odd is not None:
            raise Refused(*odd)
        late = end_notes((start, end), duration_s, "is listed as")
        if start < 0:
            notes.append(
                changed("segment_clipped", f"the window {[start, end]} was made to start at 0")
            )
        notes += late
        segments.append((max(0.0, start), end))
    if len(set(segments)) < len(segments):
        notes.append(kept("repeated_segment", f"two of the windows {segments} are the same"))
    return tuple(segments), notes


def end_notes(window: Seconds, duration_s: float | None, what: str) -> list[AuditEntry]:
    """Notes that a window ends after its video.

    Args:
        what: How the duration is known, such as ``is listed as``.

    Raises:
        Refused: It ends later by more than the whole video.
    """
    if duration_s is None or window[1] <= duration_s + _NOISE_S:
        return []
    said = f"which {what} {duration_s:g} s long"
    if window[1] > 2 * duration_s:
        raise Refused(
            "segment_outside",
            f"the window {list(window)} is longer than the video, {said}: it is perhaps in another "
            "unit, or of another video. Correct it, or leave the row out.",
        )
    note = f"the window {list(window)} ends after the video, {said}"
    return [kept("segment_beyond_end", note)]


def moment_question(text: str) -> str:
    """Asks when something happens."""
    if not text.strip():
        raise Refused("empty_question", "the row describes nothing. Leave it out.")
    return MOMENT_QUESTION.format(text.strip())


def moment_answer(segments: Sequence[Seconds]) -> AnswerInfo:
    """Says when it happens.

    Raises:
        Refused: There is no window.
    """
    if not segments:
        raise Refused(
            "no_answer",
            "the row has no window, so its question has no answer: it is perhaps of a test split "
            "whose answers are kept back. Leave it out.",
        )
    said = (_ANSWER.format(f"{start:.15g}", f"{end:.15g}") for start, end in segments)
    return AnswerInfo(kind="span", value=", ".join(said))


def duration_notes(first: float | None, second: float | None, what: str) -> list[AuditEntry]:
    """Notes that two durations of a video differ by more than rounding.

    Args:
        what: What they are, such as ``listed, decoded``.
    """
    if first is None or second is None or abs(first - second) <= _LISTED_S:
        return []
    return [kept("duration_differs", f"durations ({what}): {first:g} s, {second:g} s")]
