"""Training texts of the base checkpoints: what a turn should say, in an episode's exact layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reframe_vl.mini.video_world import COARSE_BUDGET, MiniVideo
from reframe_vl.mini.world import GRID, UNIT_PX, MiniImage
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.prompt import Prompt, PromptSettings, build_prompt
from reframe_vl.tools.base import Tool, ToolRequest
from reframe_vl.tools.codec import Codec
from reframe_vl.tools.coordinates import from_pixels
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import (
    Box,
    Context,
    Markup,
    Modality,
    Part,
    Provenance,
    Quoted,
    Sample,
    Span,
)

TOOLS: dict[Modality, Tool] = {Modality.IMAGE: CropImage(), Modality.VIDEO: SelectFrames()}

PROMPTS = PromptSettings(show_tools=False, frame_hint=False, frame_pixels=COARSE_BUDGET)
"""As in the experiments: no system prompt, and a video's frames coarse."""


@dataclass(frozen=True)
class LessonWriter:
    """Writes contexts whose injected spans are to be imitated, in the words of a codec."""

    codec: Codec
    encoder: Encoder
    view_maker: ViewMaker

    def prompt(self, sample: Sample) -> Span:
        """The prompt of an episode."""
        return self._prompt(sample).full

    def prompt_alone(self, sample: Sample) -> Span:
        """What is left of the prompt after the original view was dropped."""
        return self._prompt(sample).text_only

    def call(
        self, sample: Sample, request: ToolRequest, provenance: Provenance = Provenance.INJECTED
    ) -> Span:
        """The turn that calls the tool."""
        if request.boxes:
            arguments = {"bbox_2d": self._numbers(sample, request.boxes[0])}
        else:
            arguments = {"frames": list(request.frames)}
        return self._markup(self.codec.render_call(request.name, arguments), provenance)

    def observation(self, sample: Sample, request: ToolRequest) -> Span:
        """What the tool returns."""
        budget = self.view_maker.max_pixels
        parts: list[Part] = []
        for image in TOOLS[sample.modality].run(request, sample.media, budget).images:
            parts += [Quoted(image.caption)] if image.caption else []
            parts.append(self.view_maker.view(image.pixels, budget))
        return self.encoder.span(self.codec.observation(parts), Provenance.OBSERVED)

    def answer(self, digit: str) -> Span:
        """The turn that answers."""
        return self._markup(self.codec.render_answer(digit), Provenance.INJECTED)

    def answer_at_once(self, sample: Sample) -> Context:
        """An answer without a call."""
        return Context([self.prompt(sample), self.answer(sample.answer.value)])

    def look_and_answer(self, sample: Sample, request: ToolRequest, digit: str) -> Context:
        """A call, its observation and an answer."""
        return Context(
            [
                self.prompt(sample),
                self.call(sample, request),
                self.observation(sample, request),
                self.answer(digit),
            ]
        )

    def answer_from_look(self, sample: Sample, request: ToolRequest) -> Context:
        """An answer after the original view was dropped; the call before it is not trained."""
        return Context(
            [
                self.prompt_alone(sample),
                self.call(sample, request, Provenance.OBSERVED),
                self.observation(sample, request),
                self.answer(sample.answer.value),
            ]
        )

    def caption(self, sample: Sample) -> Context:
        """Where, or when, each square is: the numbers of its call directly after the colour.

        It teaches to locate much faster than calls do, whose opening stands between the question's
        colour and the numbers.
        """
        spans = [self._prompt(replace(sample, question="")).full]
        for color, numbers in self._places(sample):
            spans.append(self._markup(f" {color}", Provenance.OBSERVED))
            spans.append(self._markup(",".join(map(str, numbers)), Provenance.INJECTED))
        return Context(spans)

    def _places(self, sample: Sample) -> list[tuple[str, Sequence[int | float]]]:
        media = sample.media
        if isinstance(media, MiniVideo):
            return [(e.color, run) for e in media.events for run in e.segments]
        return [(s.color, self._numbers(sample, s.box)) for s in mini_image(sample).squares]

    def _prompt(self, sample: Sample) -> Prompt:
        return build_prompt(sample, self.codec, self.encoder, self.view_maker, (), PROMPTS)

    def _numbers(self, sample: Sample, box: Box) -> list[int | float]:
        size = sample.media.size
        return from_pixels(box, self.codec.frame, size, size)

    def _markup(self, text: str, provenance: Provenance) -> Span:
        return self.encoder.span([Markup(text)], provenance)


def mini_image(sample: Sample) -> MiniImage:
    """The scene of a sample of the mini image world.

    Raises:
        TypeError: The sample is of another world.
    """
    if not isinstance(sample.media, MiniImage):
        raise TypeError(
            f"Sample {sample.id} shows a {type(sample.media).__name__}, not a scene of MiniWorld."
        )
    return sample.media


def cue_digit(sample: Sample) -> int:
    """The digit that a sample's cue names.

    Raises:
        TypeError: The sample is of another world.
    """
    if not isinstance(sample.media, MiniImage | MiniVideo):
        raise TypeError(
            f"Sample {sample.id} shows a {type(sample.media).__name__}: lessons are written for "
            "samples of MiniWorld and MiniVideoWorld."
        )
    return sample.media.cue_digit


def evidence_requests(sample: Sample) -> list[ToolRequest]:
    """The requests that show a sample's evidence, one an item."""
    evidence, name = sample.evidence, TOOLS[sample.modality].name
    if evidence is None:
        return []
    boxes = [ToolRequest(name, boxes=(box,)) for box in evidence.boxes]
    return [*boxes, *(ToolRequest(name, frames=run) for run in evidence.segments)]


def draw_request(
    sample: Sample, exact: float, jittered: float, rng: np.random.Generator
) -> ToolRequest:
    """Draws what to call for: the evidence, something near it, or anything.

    Args:
        sample: Its first evidence item is the one that counts.
        exact: Probability of the evidence.
        jittered: Probability of a near miss; the rest is drawn without a look at it.
        rng: Random numbers.
    """
    request = evidence_requests(sample)[0]
    if request.boxes:
        return replace(request, boxes=(draw_box(request.boxes[0], exact, jittered, rng),))
    media = sample.media
    if not isinstance(media, MiniVideo):
        raise TypeError(f"Sample {sample.id} has frames as evidence but is no MiniVideo.")
    frames = draw_frames(request.frames, media.num_frames, exact, jittered, rng)
    return replace(request, frames=frames)


def draw_box(evidence: Box, exact: float, jittered: float, rng: np.random.Generator) -> Box:
    """Draws a box to call for: the evidence, one near it, or any of up to 4×4 units."""
    draw = rng.random()
    if draw < exact:
        return evidence
    if draw < exact + jittered:
        x0, y0, x1, y1 = (int(v) // UNIT_PX for v in evidence)
        # Edges that both move inwards leave nothing: draw again.
        while True:
            dx0, dy0, dx1, dy1 = (int(v) for v in rng.integers(-1, 2, 4))
            units = tuple(min(GRID, max(0, v)) for v in (x0 + dx0, y0 + dy0, x1 + dx1, y1 + dy1))
            if units[0] < units[2] and units[1] < units[3]:
                return _in_pixels(units)
    width, height = (int(v) for v in rng.integers(1, 5, 2))
    x, y = int(rng.integers(GRID - width + 1)), int(rng.integers(GRID - height + 1))
    return _in_pixels((x, y, x + width, y + height))


def draw_frames(
    evidence: Sequence[int],
    num_frames: int,
    exact: float,
    jittered: float,
    rng: np.random.Generator,
) -> tuple[int, ...]:
    """Draws frames to call for: the evidence, a run off by at most one, or any of up to 2."""
    draw = rng.random()
    if draw < exact:
        return tuple(evidence)
    if draw < exact + jittered:
        while True:
            first, last = evidence[0] + rng.integers(-1, 2), evidence[-1] + rng.integers(-1, 2)
            if 0 <= first <= last < num_frames:
                return tuple(range(int(first), int(last) + 1))
    length = int(rng.integers(1, 3))
    start = int(rng.integers(num_frames - length + 1))
    return tuple(range(start, start + length))


def _in_pixels(units: Sequence[int]) -> Box:
    x0, y0, x1, y1 = (float(v * UNIT_PX) for v in units)
    return (x0, y0, x1, y1)
