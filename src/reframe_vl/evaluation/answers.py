"""Every answer of an evaluation, as a line of a file: what resumes it, and what is scored.

A line says nothing of time, machine or folder: the same evaluation gives the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reframe_vl.evaluation.benchmarks.base import Response
from reframe_vl.evaluation.outcomes import LeftOut
from reframe_vl.evaluation.rules.spans import Span, spans_of_frames
from reframe_vl.rewards.grounding import grounding_reward
from reframe_vl.types import Box, CallStatus, Rollout, Sample, Termination, VideoMedia

Key = tuple[str, int, str]
"""Condition, number of the answer, and the item's id."""


@dataclass(frozen=True)
class Answered:
    """How one item went once.

    Attributes:
        condition: How it was played: the arm, and the budget where one is set.
        number: Of several answers that were sampled in the same condition.
        text: The content of the last answer block; empty where there was none.
        blocks: Answer blocks of the last turn.
        calls: Successful calls of the policy itself.
        refused: Calls that were refused.
        visual_tokens: Of the whole rollout.
        boxes: Regions that these calls returned, in pixels of the image.
        spans: Time that they returned frames of.
        iou: Of the calls with the evidence; None where the item has none.
        left_out: Why it has no outcome, where it has none; the other fields then say little.
        error: The infrastructure's failure.
    """

    item: str
    condition: str
    number: int = 0
    text: str = ""
    blocks: int = 0
    termination: str = ""
    turns: int = 0
    calls: int = 0
    refused: int = 0
    sampled_tokens: int = 0
    visual_tokens: int = 0
    boxes: tuple[Box, ...] = ()
    spans: tuple[Span, ...] = ()
    iou: float | None = None
    left_out: str | None = None
    error: str = ""

    @property
    def key(self) -> Key:
        """Names it within an evaluation."""
        return (self.condition, self.number, self.item)

    @property
    def response(self) -> Response:
        """What the scoring rule sees."""
        return Response(self.text, self.boxes, self.spans)

    @classmethod
    def of_line(cls, line: str | bytes) -> Answered:
        """Reads a line.

        Raises:
            ValueError: It is none.
        """
        raw: dict[str, Any] = json.loads(line)
        raw["boxes"] = tuple((b[0], b[1], b[2], b[3]) for b in raw["boxes"])
        raw["spans"] = tuple((start, end) for start, end in raw["spans"])
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})


def answered(rollout: Rollout, sample: Sample, condition: str, number: int = 0) -> Answered:
    """The line of a rollout."""
    own = [call for call in rollout.calls if call.succeeded and not call.by_gate]
    frames = sorted({frame for call in own for frame in call.frames})
    spans: list[Span] = []
    if frames and isinstance(sample.media, VideoMedia):
        spans = spans_of_frames(frames, sample.media.timestamps_s)
    why = _left_out(rollout)
    return Answered(
        item=sample.id,
        condition=condition,
        number=number,
        text=rollout.answers[-1] if rollout.answers else "",
        blocks=len(rollout.answers),
        termination=rollout.termination.value,
        turns=rollout.num_turns,
        calls=len(own),
        refused=sum(call.status is CallStatus.REFUSED for call in rollout.calls),
        sampled_tokens=rollout.num_sampled,
        visual_tokens=rollout.num_visual_tokens,
        boxes=tuple(box for call in own for box in call.boxes),
        spans=tuple(spans),
        iou=None if why else grounding_reward(rollout, sample),
        left_out=why.value if why else None,
        error=rollout.error,
    )


def _left_out(rollout: Rollout) -> LeftOut | None:
    """Why a rollout says nothing of the policy; whether its answer can be read is the rule's."""
    tool_failed = any(call.status is CallStatus.FAILED for call in rollout.calls)
    if rollout.termination is Termination.ERROR or tool_failed:
        return LeftOut.FAILED
    return None if rollout.num_turns else LeftOut.OVER_BUDGET


class AnswerFile:
    """The lines on disk: appended as they come, each once.

    A line that was cut short, as its process was killed, is dropped when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
            ValueError: A line in the middle cannot be read.
        """
        self.path = path
        self._known: dict[Key, Answered] = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as stream:
                stream.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = Answered.of_line(line)
            except (ValueError, TypeError, LookupError) as error:
                raise ValueError(
                    f"{path}, line {number}: it cannot be read ({error}). Remove the line: its "
                    "item is then played again."
                ) from error
            self._known[found.key] = found

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __getitem__(self, key: Key) -> Answered:
        return self._known[key]

    def of(self, condition: str, number: int = 0) -> dict[str, Answered]:
        """The answers in a condition by item."""
        return {
            item: found
            for (name, n, item), found in self._known.items()
            if (name, n) == (condition, number)
        }

    def add(self, answers: Iterable[Answered]) -> None:
        """Appends those that are not there yet; they are on the disk when this returns."""
        new = list(self._new(answers))
        if not new:
            return
        with self.path.open("ab") as stream:
            stream.write("".join(f"{_line(found)}\n" for found in new).encode("ascii"))
            stream.flush()
            os.fsync(stream.fileno())

    def _new(self, answers: Iterable[Answered]) -> Iterator[Answered]:
        for found in answers:
            if found.key not in self._known:
                self._known[found.key] = found
                yield found


def _line(found: Answered) -> str:
    return json.dumps(vars(found))
