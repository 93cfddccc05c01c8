"""The observation gate (docs/method.md, 1.2): which of a rollout's calls the environment rewrites.

At every call the gate looks for the evidence item, among those not acquired yet, that the call
overlaps most. An invalid call, or one that overlaps it too little, gives way to the item's
canonical call. A rollout on a sample without evidence, or that never calls, is left alone, and so
are calls of tools that keep state: code has no place to compare.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reframe_vl.rewards.grounding import box_reward, frame_reward
from reframe_vl.rollout.prompt import Prompt
from reframe_vl.tools.base import Refusal, StatefulTool, Tool, ToolRequest
from reframe_vl.types import Box, Evidence, Modality, Sample

logger = logging.getLogger(__name__)

BELOW_THRESHOLD = "below_threshold"
"""Why a valid call was replaced."""


@dataclass(frozen=True)
class Gate:
    """When a call gives way; the numbers are our defaults.

    Attributes:
        threshold: Delta, the IoU with an evidence item from which a call stands.
        probability: Of stepping in where it could.
        budget: Interventions of a rollout; None is no bound.
        first_call_only: Look at a rollout's first call alone.
        repair: Write the canonical call into the rollout. Off, the rollout goes on with its own
            call, and the canonical one is kept beside it as a branch to learn from.
    """

    threshold: float = 0.5
    probability: float = 1.0
    budget: int | None = None
    first_call_only: bool = False
    repair: bool = True

    def __post_init__(self) -> None:
        for name in ("threshold", "probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"gate.{name} is {getattr(self, name)}: it must lie in [0, 1].")
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            raise ValueError(
                f"gate.budget is {self.budget!r}: give a whole number of 0 or more, or null for no "
                "bound."
            )


@dataclass(frozen=True)
class Item:
    """A box, or one run of frames, and the call that asks for it."""

    tool: Tool
    arguments: dict[str, Any]
    box: Box | None = None
    frames: tuple[int, ...] = ()

    def overlap(self, request: ToolRequest) -> float:
        """IoU of what a call asks for with this item."""
        if self.box is None:
            return frame_reward(request.frames, self.frames)
        asked_N4 = np.array(request.boxes, np.float64).reshape(-1, 4)
        return box_reward(asked_N4, np.array([self.box], np.float64))


def evidence_items(sample: Sample, prompt: Prompt, tools: Sequence[Tool]) -> list[Item]:
    """A sample's evidence with its canonical calls, in annotation order.

    A record whose evidence cannot be asked for within the limits has none, and is named.
    """
    evidence = sample.evidence or Evidence()
    items: list[Item] = []
    for tool in tools:
        if tool.modality is not sample.modality or isinstance(tool, StatefulTool):
            continue
        try:
            calls = tool.canonical(evidence, prompt.scene)
        except ValueError as error:
            logger.warning("Sample %s is not gated: %s", sample.id, error)
            return []
        boxed = tool.modality is Modality.IMAGE
        places: Sequence[Any] = evidence.boxes if boxed else evidence.segments
        items += [
            Item(tool, call, box=place) if boxed else Item(tool, call, frames=tuple(place))
            for call, place in zip(calls, places, strict=True)
        ]
    return items


@dataclass
class GateWatch:
    """The gate at work in one rollout.

    Attributes:
        seed: Of the rollout; draws depend on it and on the number of the call alone.
    """

    gate: Gate
    items: Sequence[Item]
    seed: int
    interventions: int = 0
    _acquired: set[int] = field(default_factory=set)
    _calls: int = 0

    def intervene(self, checked: tuple[Tool, ToolRequest] | Refusal) -> Item | None:
        """The item whose canonical call takes this call's place; None lets it stand."""
        if not isinstance(checked, Refusal) and isinstance(checked[0], StatefulTool):
            return None
        self._calls += 1
        gate = self.gate
        if gate.first_call_only and self._calls > 1:
            return None
        if gate.budget is not None and self.interventions >= gate.budget:
            return None
        missing = [i for i in range(len(self.items)) if i not in self._acquired]
        if not missing:
            return None
        wanted = missing[0]
        if not isinstance(checked, Refusal):
            overlaps = {i: self.items[i].overlap(checked[1]) for i in missing}
            # The first of equals.
            wanted = max(missing, key=lambda i: overlaps[i])
            if overlaps[wanted] >= gate.threshold:
                return None
        draw = np.random.default_rng([self.seed, self._calls]).random()
        if draw >= gate.probability:
            return None
        self.interventions += 1
        return self.items[wanted]

    def executed(self, request: ToolRequest) -> None:
        """Marks what an executed call acquired."""
        self._acquired |= {
            i for i, item in enumerate(self.items) if item.overlap(request) >= self.gate.threshold
        }

    def settle(self, item: Item) -> None:
        """Marks an item whose canonical call was written: it is not written again.

        Rounding may have cost it some overlap, and a tool that failed would fail again.
        """
        self._acquired.add(self.items.index(item))
