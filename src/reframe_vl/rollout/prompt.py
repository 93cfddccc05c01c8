"""The first messages of an episode: system prompt, media as views, question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.base import Scene, Tool
from reframe_vl.tools.codec import Codec
from reframe_vl.tools.select_frames import frame_range
from reframe_vl.types import (
    Media,
    Modality,
    Part,
    Provenance,
    Quoted,
    Sample,
    Span,
    VideoMedia,
    View,
)

VideoAs = Literal["frames", "video"]


@dataclass(frozen=True)
class Prompt:
    """The prompt of a sample, with and without its original visual input.

    Attributes:
        full: With the media, unless they are in the tools' hands alone.
        text_only: What remains of it once the original visual input was dropped.
        scene: What tool calls are checked against.
        native_video: Frames that a tool returns are shown as a video, not one by one.
    """

    full: Span
    text_only: Span
    scene: Scene
    native_video: bool = False


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
        video_as: How frames are fed, those of a video's first view and those that a tool returns:
            each as a still image after its time (``frames``), or as a video in the family's native
            form (``video``).
        on_demand_video: Show no frames of a video and say what it is like: what the policy wants
            to see it has to ask its tools for (docs/method.md, 1.4).
    """

    system: str = ""
    show_tools: bool = True
    view_pixels: int | None = None
    frame_pixels: int | None = None
    min_side: float = 2.0
    max_frames: int = 8
    reorder_reversed: bool = False
    frame_hint: bool = True
    video_as: VideoAs = "frames"
    on_demand_video: bool = False

    def __post_init__(self) -> None:
        if self.video_as not in get_args(VideoAs):
            raise ValueError(f"video_as is {self.video_as!r}: it must be frames or video.")


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
        ValueError: The video is to be fed in a native form that the model does not have.
    """
    media_parts = _media_parts(
        sample.media, codec, view_maker, settings, _look(sample.media, view_maker, settings)
    )
    first = next((part for part in media_parts if isinstance(part, View)), None)
    system = _system_text(sample, codec, tools, settings)
    scene = Scene.of(
        sample,
        codec.frame,
        _size(first, view_maker) if first else sample.media.size,
        min_side=settings.min_side,
        max_frames=settings.max_frames,
        reorder_reversed=settings.reorder_reversed,
    )
    question = Quoted(_question_text(scene, sample, settings))
    return Prompt(
        full=encoder.span(codec.prompt(system, [*media_parts, question]), Provenance.PROMPT),
        text_only=encoder.span(codec.prompt(system, [question]), Provenance.PROMPT),
        scene=scene,
        native_video=_is_native(sample.media, settings),
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
        ValueError: The video is to be fed in a native form that the model does not have.
    """
    media = sample.media
    width, height = media.size
    budget = settings.frame_pixels if isinstance(media, VideoMedia) else settings.view_pixels
    height, width = view_maker.fed_size(height, width, budget)
    grid_hw = (height // view_maker.patch_size, width // view_maker.patch_size)
    modality = Modality.VIDEO if _is_native(media, settings) else Modality.IMAGE

    def unseen(frames: range) -> View:
        time = view_maker.temporal_patches(len(frames))
        tokens = time * view_maker.num_tokens(height, width)
        return View(None, (time, *grid_hw), tokens, "", modality)

    system = _system_text(sample, codec, tools, settings)
    scene = Scene.of(sample, codec.frame, (0, 0), max_frames=settings.max_frames)
    parts = _media_parts(media, codec, view_maker, settings, unseen)
    question = Quoted(_question_text(scene, sample, settings))
    span = encoder.span(codec.prompt(system, [*parts, question]), Provenance.PROMPT)
    return len(span), span.num_visual_tokens


def num_grids(media: Media, view_maker: ViewMaker, settings: PromptSettings) -> int:
    """Grids of visual tokens that a first view has: one an image, frame or temporal patch."""
    frames = len(media.timestamps_s) if isinstance(media, VideoMedia) else 1
    return view_maker.temporal_patches(frames) if _is_native(media, settings) else frames


def timestamp(seconds: float) -> str:
    """How a frame's time is written before it, in prompts and in observations alike."""
    return f"<{seconds:.1f} seconds>"


def _is_native(media: Media, settings: PromptSettings) -> bool:
    return isinstance(media, VideoMedia) and settings.video_as == "video"


def _media_parts(
    media: Media,
    codec: Codec,
    view_maker: ViewMaker,
    settings: PromptSettings,
    view: Callable[[range], View],
) -> list[Part]:
    """The media as views, those of a video after their times; none of a video on demand.

    Args:
        view: Makes the one view of some frames; an image is its only frame.
    """
    if not isinstance(media, VideoMedia):
        return [view(range(1))]
    if settings.on_demand_video:
        return []
    if _is_native(media, settings):
        return native_video(codec, view_maker, media.timestamps_s, view)
    return _timed_parts(media.timestamps_s, 1, view)


def native_video(
    codec: Codec, view_maker: ViewMaker, times_s: Sequence[float], view: Callable[[range], View]
) -> list[Part]:
    """Frames as a video in the family's own form.

    Args:
        codec: Of the family.
        view_maker: Of the model.
        times_s: When each frame is.
        view: Makes the one view of some of the frames.

    Raises:
        ValueError: The family has no such form.
    """
    if codec.video is None:
        raise ValueError(
            "This model family has no native form of videos: set "
            "rollout.settings.prompt.video_as=frames."
        )
    if codec.video == "block":
        return [view(range(len(times_s)))]
    return _timed_parts(times_s, view_maker.temporal_patch_size, view)


def _timed_parts(times_s: Sequence[float], size: int, view: Callable[[range], View]) -> list[Part]:
    """Views of ``size`` frames each, every one after its time."""
    parts: list[Part] = []
    for start in range(0, len(times_s), size):
        frames = range(len(times_s))[start : start + size]
        # A temporal patch is in the middle of its frames, as the families' processors have it.
        middle = (times_s[frames[0]] + times_s[frames[-1]]) / 2
        parts += [Quoted(timestamp(middle)), view(frames)]
    return parts


def _look(media: Media, view_maker: ViewMaker, settings: PromptSettings) -> Callable[[range], View]:
    """Looks at the media and returns what makes a view of some of its frames."""
    if not isinstance(media, VideoMedia):
        budget = settings.view_pixels or view_maker.max_pixels
        whole = view_maker.view(media.look(None, budget), budget)
        return lambda _: whole
    budget = settings.frame_pixels or view_maker.max_pixels
    times = media.timestamps_s
    pixels = [] if settings.on_demand_video else media.look(range(len(times)), budget)
    if not _is_native(media, settings):
        return lambda frames: view_maker.view(pixels[frames[0]], budget)
    return lambda frames: view_maker.video(
        pixels[frames.start : frames.stop], times[frames.start : frames.stop], budget
    )


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
    facts = ""
    if isinstance(sample.media, VideoMedia) and settings.on_demand_video:
        facts = f"{_facts(sample.media)}\n"
    return facts + hint + sample.question + "".join(lettered)


def _facts(video: VideoMedia) -> str:
    """What is said of a video that is not shown."""
    times, (width, height) = video.timestamps_s, video.size
    seconds = times[-1] - times[0]
    fps = (len(times) - 1) / seconds if seconds > 0 else 1.0
    return (
        f"The video lasts {seconds + 1 / fps:.1f} s: {len(times)} frames of {width}x{height} "
        f"pixels, {fps:.3g} a second."
    )
