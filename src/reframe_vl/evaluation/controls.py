"""Forced calls whose pixels alone differ: the evidence, a control, or nothing to see.

What they measure is in docs/method.md, 1.6.

The calls are the canonical ones of a sample's evidence, the same for every model and every arm.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from reframe_vl.evaluation.outcomes import LeftOut
from reframe_vl.rollout.episode import ToolRunner
from reframe_vl.rollout.prompt import Prompt
from reframe_vl.tools.base import Refusal, Scene, StatefulTool, Tool, ToolRequest, ToolResult
from reframe_vl.types import Box, Evidence, Media, Sample

logger = logging.getLogger(__name__)

GREY = 128
"""Of the constant image."""

_LATTICE = 64
"""Steps of a control's place along each side of the image."""


class Content(StrEnum):
    """What the forced calls return."""

    TRUE = "true"
    RANDOM = "random"
    BLANK = "blank"


def control_box(
    box: Box, size: tuple[int, int], evidence: Sequence[Box], rng: np.random.Generator
) -> Box | None:
    """A region of a box's size that is disjoint from all evidence; None where there is none.

    It is the box moved by whole pixels, so that a crop rounds to the same size at both places. The
    places form a lattice that includes the image's edges.

    Args:
        box: In pixels of the original image.
        size: (width, height) of the image.
        evidence: Boxes to keep clear of; touching them is allowed.
        rng: Chooses among the places.
    """
    x0, y0, x1, y1 = box
    dx_X = _shifts(x0, x1, size[0])
    dy_Y = _shifts(y0, y1, size[1])
    free_YX = np.ones((len(dy_Y), len(dx_X)), bool)
    for left, top, right, bottom in evidence:
        beside_X = (x1 + dx_X <= left) | (x0 + dx_X >= right)
        beside_Y = (y1 + dy_Y <= top) | (y0 + dy_Y >= bottom)
        free_YX &= beside_X[None] | beside_Y[:, None]
    places = np.argwhere(free_YX)
    if not len(places):
        return None
    row, column = places[rng.integers(len(places))]
    dx, dy = float(dx_X[column]), float(dy_Y[row])
    return (x0 + dx, y0 + dy, x1 + dx, y1 + dy)


def _shifts(low: float, high: float, length: int) -> npt.NDArray[np.int64]:
    """Whole-pixel shifts that keep ``[low, high]`` inside ``[0, length]``, both ends included."""
    first, last = -math.floor(low), math.floor(length - high)
    step = max(1, -(-(last - first) // _LATTICE))
    return np.unique(np.append(np.arange(first, last + 1, step), last))


def control_frames(
    frames: Sequence[int], num_frames: int, evidence: frozenset[int], rng: np.random.Generator
) -> tuple[int, ...] | None:
    """As many frames, as far apart, that are disjoint from all evidence; None where none are."""
    shifts = [
        shift
        for shift in range(-min(frames), num_frames - max(frames))
        if not any(frame + shift in evidence for frame in frames)
    ]
    if not shifts:
        return None
    shift = shifts[rng.integers(len(shifts))]
    return tuple(frame + shift for frame in frames)


def control_request(
    request: ToolRequest, evidence: Evidence, scene: Scene, rng: np.random.Generator
) -> ToolRequest | None:
    """What a canonical request is answered with in the random arm; None where nothing can be."""
    boxes = [control_box(box, scene.size, evidence.boxes, rng) for box in request.boxes]
    frames: tuple[int, ...] | None = ()
    if request.frames:
        frames = control_frames(request.frames, scene.num_frames, evidence.frames, rng)
    found = tuple(box for box in boxes if box is not None)
    if frames is None or len(found) < len(boxes):
        return None
    return replace(request, boxes=found, frames=frames)


@dataclass
class ForcedCalls:
    """The canonical calls of samples, and what they return in each arm.

    Attributes:
        max_pixels: Budget of each returned image.
        left_out: Samples that the forced-call arms cannot use; grows as samples are met.
    """

    tools: Sequence[Tool]
    max_pixels: int
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    _controls: dict[str, dict[Hashable, ToolRequest]] = field(default_factory=dict)

    def calls(self, sample: Sample, prompt: Prompt) -> list[tuple[Tool, dict[str, Any]]]:
        """One canonical call an evidence item; none where the sample is left out."""
        evidence = sample.evidence or Evidence()
        try:
            calls = [
                (tool, arguments)
                for tool in self.tools
                # What code shows cannot be replaced by a control of equal size.
                if tool.modality is sample.modality and not isinstance(tool, StatefulTool)
                for arguments in tool.canonical(evidence, prompt.scene)
            ]
        except ValueError as error:
            logger.warning("Sample %s has no part in the forced-call arms: %s", sample.id, error)
            self.left_out[sample.id] = LeftOut.NO_CANONICAL_CALL
            return []
        if not calls:
            self.left_out[sample.id] = LeftOut.NO_EVIDENCE
            return []
        # Of the sample alone: every model and every arm meets the same control.
        digest = hashlib.sha256(f"control/{sample.id}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:16], "big"))
        controls: dict[Hashable, ToolRequest] = {}
        for tool, arguments in calls:
            request = tool.check(arguments, prompt.scene)
            if isinstance(request, Refusal):
                raise ValueError(
                    f"The canonical call {arguments} of sample {sample.id} is refused "
                    f"({request.reason}): rebuild its record's evidence."
                )
            control = control_request(request, evidence, prompt.scene, rng)
            if control is None:
                self.left_out[sample.id] = LeftOut.NO_CONTROL
                return []
            controls[request.identity] = control
        self._controls[sample.id] = controls
        return calls

    def runner(self, content: Content) -> Callable[[Sample], ToolRunner]:
        """Executes the calls of a sample; places and captions are the evidence's in every arm."""

        def of_sample(sample: Sample) -> ToolRunner:
            def run(tool: Tool, request: ToolRequest, media: Media) -> ToolResult:
                result = tool.run(request, media, self.max_pixels)
                match content:
                    case Content.TRUE:
                        return result
                    case Content.BLANK:
                        pixels = [np.full_like(image.pixels, GREY) for image in result.images]
                    case Content.RANDOM:
                        control = self._controls[sample.id][request.identity]
                        other = tool.run(control, media, self.max_pixels)
                        pixels = [image.pixels for image in other.images]
                images = zip(result.images, pixels, strict=True)
                return replace(result, images=tuple(replace(i, pixels=p) for i, p in images))

            return run

        return of_sample
