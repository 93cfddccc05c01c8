"""The first messages of an episode: system prompt, media as views, question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.base import Scene, Tool
from reframe_vl.tools.codec import Codec
from reframe_vl.tools.select_frames import frame_range
from reframe_vl.types import Part, Provenance, Quoted, Sample, Span, VideoMedia, View


@dataclass(frozen=True)
class Prompt:
    """The prompt of a sample, with and without its original visual input.

    Attributes:
        full: With the media.
        text_only: What remains of it once the original visual input was dropped.
        scene: What tool calls are checked against.
    """

    full: Span
    text_only: Span
    scene: Scene


@dataclass(frozen=True)
class PromptSettings:
    """How prompts are built.

    Attributes:
        system: Words of the system prompt; the family's tool section is added to them.
        show_tools: Whether the tool section is added.
        view_pixels: Budget of the first view in pixels; None is the model's own limit.
        frame_pixels: Budget of each frame of a video's first view.
        min_side: Shortest side of a region that can be cropped, in original pixels.
        max_frames: Most frames that one call may select.
        reorder_reversed: Put reversed boxes in order instead of refusing them.
        frame_hint: Say before a video's question which frames there are to select.
    """

    system: str = ""
    show_tools: bool = True
    view_pixels: int | None = None
    frame_pixels: int | None = None
    min_side: float = 2.0
    max_frames: int = 8
    reorder_reversed: bool = False
    frame_hint: bool = True


def build_prompt(
    sample: Sample,
    codec: Codec,
    encoder: Encoder,
    view_maker: ViewMaker,
    tools: Sequence[Tool],
    settings: PromptSettings,
) -> Prompt:
    """Looks at a sample's media and writes its first messages.

    Raises:
        MediaError: The media cannot be read.
    """
    media_parts, fed = _media_parts(sample, view_maker, settings)
    system = _system_text(sample, codec, tools, settings)
    scene = Scene.of(
        sample,
        codec.frame,
        fed,
        min_side=settings.min_side,
        max_frames=settings.max_frames,
        reorder_reversed=settings.reorder_reversed,
    )
    question = Quoted(_question_text(scene, sample, settings))
    return Prompt(
        full=encoder.span(codec.prompt(system, [*media_parts, question]), Provenance.PROMPT),
        text_only=encoder.span(codec.prompt(system, [question]), Provenance.PROMPT),
        scene=scene,
    )


def prompt_tokens(
    sample: Sample,
    codec: Codec,
    encoder: Encoder,
    view_maker: ViewMaker,
    tools: Sequence[Tool],
    settings: PromptSettings,
) -> tuple[int, int]:
    """Expanded tokens, and visual tokens among them, of a sample's prompt.

    From the media's size alone: no pixels are read, so that a whole data set can be checked.

    Raises:
        MediaError: The size cannot be read.
    """
    media = sample.media
    width, height = media.size
    if isinstance(media, VideoMedia):
        budget, marks = settings.frame_pixels, [timestamp(t) for t in media.timestamps_s]
    else:
        budget, marks = settings.view_pixels, [""]
    one = view_maker.num_tokens(*view_maker.fed_size(height, width, budget))
    system = _system_text(sample, codec, tools, settings)
    words: list[Part] = [Quoted(mark) for mark in marks if mark]
    scene = Scene.of(sample, codec.frame, (0, 0), max_frames=settings.max_frames)
    text = codec.prompt(system, [*words, Quoted(_question_text(scene, sample, settings))])
    # Each image also has its two vision tags.
    visual = one * len(marks)
    return len(encoder.span(text, Provenance.PROMPT)) + visual + 2 * len(marks), visual


def timestamp(seconds: float) -> str:
    """How a frame's time is written before it, in prompts and in observations alike."""
    return f"<{seconds:.1f} seconds>"


def _media_parts(
    sample: Sample, view_maker: ViewMaker, settings: PromptSettings
) -> tuple[list[Part], tuple[int, int]]:
    """The media as views, and the size at which the first one is fed."""
    media = sample.media
    if isinstance(media, VideoMedia):
        budget = settings.frame_pixels or view_maker.max_pixels
        frames = media.look(range(len(media.timestamps_s)), budget)
        views = [view_maker.view(frame, budget) for frame in frames]
        parts: list[Part] = []
        for seconds, view in zip(media.timestamps_s, views, strict=True):
            parts += [Quoted(timestamp(seconds)), view]
    else:
        budget = settings.view_pixels or view_maker.max_pixels
        views = [view_maker.view(media.look(None, budget), budget)]
        parts = [*views]
    return parts, _size(views[0], view_maker)


def _size(view: View, view_maker: ViewMaker) -> tuple[int, int]:
    _, height, width = view.grid_thw
    return width * view_maker.patch_size, height * view_maker.patch_size


def _system_text(
    sample: Sample, codec: Codec, tools: Sequence[Tool], settings: PromptSettings
) -> str:
    usable = [tool for tool in tools if tool.modality is sample.modality]
    return codec.system_text(settings.system, usable if settings.show_tools else [])


def _question_text(scene: Scene, sample: Sample, settings: PromptSettings) -> str:
    hint = f"{frame_range(scene)}\n" if scene.num_frames and settings.frame_hint else ""
    lettered = [f"\n{chr(65 + i)}. {text}" for i, text in enumerate(sample.options)]
    return hint + sample.question + "".join(lettered)
