"""Training texts of the base checkpoints: what a turn should say, in an episode's exact layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reframe_vl.mini.world import GRID, UNIT_PX, MiniImage
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import Codec
from reframe_vl.tools.coordinates import from_pixels
from reframe_vl.types import Box, Context, Markup, Part, Provenance, Quoted, Sample, Span, View


@dataclass(frozen=True)
class LessonWriter:
    """Writes contexts whose injected spans are to be imitated, in the words of a codec."""

    codec: Codec
    encoder: Encoder
    view_maker: ViewMaker

    def prompt(self, sample: Sample, *, with_image: bool = True) -> Span:
        """The prompt of an episode, or what is left of it after the original view was dropped."""
        image: list[Part] = [self._view(sample, None)] if with_image else []
        return self.encoder.span(
            self.codec.prompt("", [*image, Quoted(sample.question)]), Provenance.PROMPT
        )

    def call(self, sample: Sample, box: Box, provenance: Provenance = Provenance.INJECTED) -> Span:
        """The turn that asks for a region."""
        arguments = {"bbox_2d": self._numbers(sample, box)}
        return self._markup(self.codec.render_call("CropImage", arguments), provenance)

    def observation(self, sample: Sample, box: Box) -> Span:
        """What the tool returns for a region."""
        parts = self.codec.observation([self._view(sample, box)])
        return self.encoder.span(parts, Provenance.OBSERVED)

    def answer(self, digit: str) -> Span:
        """The turn that answers."""
        return self._markup(self.codec.render_answer(digit), Provenance.INJECTED)

    def answer_at_once(self, sample: Sample) -> Context:
        """An answer without a call."""
        return Context([self.prompt(sample), self.answer(sample.answer.value)])

    def look_and_answer(self, sample: Sample, box: Box, digit: str) -> Context:
        """A call, its observation and an answer."""
        return Context(
            [
                self.prompt(sample),
                self.call(sample, box),
                self.observation(sample, box),
                self.answer(digit),
            ]
        )

    def answer_from_crop(self, sample: Sample, box: Box) -> Context:
        """An answer after the original view was dropped; the call before it is not trained."""
        return Context(
            [
                self.prompt(sample, with_image=False),
                self.call(sample, box, Provenance.OBSERVED),
                self.observation(sample, box),
                self.answer(sample.answer.value),
            ]
        )

    def caption(self, sample: Sample) -> Context:
        """Where each square of a picture is: the coordinates directly after the colour.

        It teaches to locate much faster than calls do, whose opening stands between the question's
        colour and the coordinates.
        """
        prompt = self.codec.prompt("", [self._view(sample, None)])
        spans = [self.encoder.span(prompt, Provenance.PROMPT)]
        for square in mini_image(sample).squares:
            numbers = ",".join(map(str, self._numbers(sample, square.box)))
            spans.append(self._markup(f" {square.color}", Provenance.OBSERVED))
            spans.append(self._markup(numbers, Provenance.INJECTED))
        return Context(spans)

    def _view(self, sample: Sample, box: Box | None) -> View:
        return self.view_maker.view(mini_image(sample).look(box, self.view_maker.max_pixels))

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
            f"Sample {sample.id} shows a {type(sample.media).__name__}: lessons are written for "
            "samples of MiniWorld."
        )
    return sample.media


def evidence_box(sample: Sample) -> Box:
    """The box of the square that is asked about."""
    return mini_image(sample).squares[0].box


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


def _in_pixels(units: Sequence[int]) -> Box:
    x0, y0, x1, y1 = (float(v * UNIT_PX) for v in units)
    return (x0, y0, x1, y1)
