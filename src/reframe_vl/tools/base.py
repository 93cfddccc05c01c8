"""What a tool is, what a call is checked against, and how a call is refused.

A call travels ``text -> ProposedCall -> ToolRequest -> ToolResult``: the codec reads the text,
:func:`propose` checks the call against the scene, and the tool runs the request. Whatever is wrong
with a call is a :class:`Refusal`, a value and never an exception: a policy may write anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.types import RGB, Box, Evidence, Media, Modality, Sample, VideoMedia


class Reason(StrEnum):
    """Why a proposed call was not executed; one code a kind, so that each is counted apart."""

    # The text of the call.
    EMPTY_CALL = "empty_call"
    NOT_JSON = "not_json"
    NOT_XML = "not_xml"
    NOT_AN_OBJECT = "not_an_object"
    BAD_ARGUMENTS_JSON = "bad_arguments_json"
    NO_NAME = "no_name"
    TRAILING_TEXT = "trailing_text"
    DUPLICATE_ARGUMENT = "duplicate_argument"
    UNCLOSED_CALL = "unclosed_call"
    TRUNCATED_CALL = "truncated_call"
    """Cut by the token limit: not a sign of a malformed call."""
    SEVERAL_CALLS = "several_calls"
    CALL_WITH_ANSWER = "call_with_answer"
    # Which tool.
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_MODALITY = "wrong_modality"
    # The arguments' form.
    ARGUMENTS_NOT_MAPPING = "arguments_not_mapping"
    MISSING_ARGUMENT = "missing_argument"
    UNKNOWN_ARGUMENT = "unknown_argument"
    WRONG_TYPE = "wrong_type"
    WRONG_LENGTH = "wrong_length"
    # The arguments' meaning.
    REVERSED_BOX = "reversed_box"
    EMPTY_BOX = "empty_box"
    OUTSIDE_IMAGE = "outside_image"
    TOO_SMALL = "too_small"
    NO_FRAMES = "no_frames"
    OUT_OF_RANGE_FRAME = "out_of_range_frame"
    TOO_MANY_FRAMES = "too_many_frames"
    # The tool's fault, not the model's.
    TOOL_FAILED = "tool_failed"
    # Of a call that was executed.
    CODE_RAISED = "code_raised"
    """The model's own code raised or was stopped; what is shown of it is the result."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that was not executed.

    Attributes:
        message: For the model: what was wrong and what would be valid.
    """

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Scene:
    """What a call is checked against.

    Attributes:
        size: (width, height) of the original upright image, or of a frame of the video.
        fed_size: (width, height) of the first view as it was fed to the model.
        frame: What the numbers of the model's boxes mean.
        timestamps_s: The time of each frame of a video's grid; empty for an image.
        min_side: The shortest side of a region that can be cropped, in original pixels.
        max_frames: The most frames that one call may select.
        reorder_reversed: Put a box's reversed corners in order instead of refusing it.
    """

    modality: Modality
    size: tuple[int, int]
    fed_size: tuple[int, int]
    frame: CoordinateFrame
    timestamps_s: tuple[float, ...] = ()
    min_side: float = 2.0
    max_frames: int = 8
    reorder_reversed: bool = False

    @property
    def num_frames(self) -> int:
        """Frames of the video's grid; 0 for an image."""
        return len(self.timestamps_s)

    @classmethod
    def of(
        cls,
        sample: Sample,
        frame: CoordinateFrame,
        fed_size: tuple[int, int],
        *,
        min_side: float = 2.0,
        max_frames: int = 8,
        reorder_reversed: bool = False,
    ) -> Scene:
        """Makes the scene of a sample whose first view was fed at ``fed_size``."""
        media = sample.media
        return cls(
            modality=sample.modality,
            size=media.size,
            fed_size=fed_size,
            frame=frame,
            timestamps_s=media.timestamps_s if isinstance(media, VideoMedia) else (),
            min_side=min_side,
            max_frames=max_frames,
            reorder_reversed=reorder_reversed,
        )


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """A call as the model wrote it.

    Attributes:
        arguments: As decoded; :func:`propose` refuses anything but a mapping.
        raw: The text between the call's tags.
    """

    name: str
    arguments: Any
    raw: str = ""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A checked call: running it can only fail by the tool's fault.

    Attributes:
        boxes: In original pixels, clipped to the image.
        frames: Ascending, without repeats.
        coercions: Arguments that were converted without loss.
    """

    name: str
    boxes: tuple[Box, ...] = ()
    frames: tuple[int, ...] = ()
    coercions: int = field(default=0, compare=False)

    @property
    def identity(self) -> Hashable:
        """Equal for calls that ask for the same thing, however they were written."""
        return (self.name, self.boxes, self.frames)


@dataclass(frozen=True, slots=True)
class ToolImage:
    """One image that a tool returns.

    Attributes:
        caption: Short text to stand before it; may be empty.
    """

    pixels: RGB
    caption: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns: images, and where in the original media they are from.

    Attributes:
        text: Stands before the images.
        failed: The model's own code raised, or was stopped: it ran, but did not succeed.
    """

    images: tuple[ToolImage, ...]
    boxes: tuple[Box, ...] = ()
    frames: tuple[int, ...] = ()
    text: str = ""
    failed: bool = False


class ToolUnavailableError(RuntimeError):
    """What a tool runs on cannot be had: the rollout is not scorable, and nobody erred."""


@runtime_checkable
class Tool(Protocol):
    """A tool: a schema, a check and a pure function of the original media."""

    @property
    def name(self) -> str:
        """The name the model calls it by."""

    @property
    def modality(self) -> Modality:
        """The media it works on."""

    def schema(self, frame: CoordinateFrame) -> dict[str, Any]:
        """The function's JSON schema, as chat templates expect it, for a coordinate frame."""

    def check(self, arguments: Mapping[str, Any], scene: Scene) -> ToolRequest | Refusal:
        """Turns arguments into a request, or says what is wrong with them; never raises."""

    def run(self, request: ToolRequest, media: Media, max_pixels: int) -> ToolResult:
        """Executes a request on the original media; each image has about ``max_pixels`` at most."""

    def canonical(self, evidence: Evidence, scene: Scene) -> list[dict[str, Any]]:
        """The arguments that ask for each evidence item, in annotation order.

        Raises:
            ValueError: If an item's call would be refused: the record does not fit the limits.
        """


class StatefulTool(ABC):
    """A tool whose calls in a rollout build on each other, and may take long.

    Calls run in threads, so that several may look at one sample's media at once. A call raises
    :class:`ToolUnavailableError` where the tool has nothing to run on.
    """

    @abstractmethod
    def session(self, media: Media) -> AbstractContextManager[Tool]:
        """The tool for one rollout on these media."""

    @abstractmethod
    def close(self) -> None:
        """Ends what the tool started; it may be closed twice, and not used afterwards."""


@contextmanager
def sessions(tools: Sequence[Tool], media: Media) -> Iterator[Sequence[Tool]]:
    """The tools for one rollout: those that keep state, each in a session of its own."""
    if not any(isinstance(tool, StatefulTool) for tool in tools):
        yield tools
        return
    with ExitStack() as opened:
        yield [
            opened.enter_context(tool.session(media)) if isinstance(tool, StatefulTool) else tool
            for tool in tools
        ]


def close_tools(tools: Sequence[Tool]) -> None:
    """Ends what the tools started."""
    for tool in tools:
        if isinstance(tool, StatefulTool):
            tool.close()


def propose(
    call: ProposedCall, tools: Sequence[Tool], scene: Scene
) -> tuple[Tool, ToolRequest] | Refusal:
    """Finds the called tool and checks the call against the scene."""
    usable = [tool for tool in tools if tool.modality is scene.modality]
    valid = " and ".join(tool.name for tool in usable) or "none"
    tool = next((tool for tool in usable if tool.name == call.name), None)
    if tool is None:
        if other := next((tool for tool in tools if tool.name == call.name), None):
            return Refusal(
                Reason.WRONG_MODALITY,
                f"{other.name} works on a {other.modality}, but the input is a {scene.modality}. "
                f"Tools to call: {valid}.",
            )
        return Refusal(
            Reason.UNKNOWN_TOOL, f"There is no tool {shown(call.name)}. Tools to call: {valid}."
        )
    if not isinstance(call.arguments, Mapping):
        return Refusal(
            Reason.ARGUMENTS_NOT_MAPPING,
            f"The arguments of {tool.name} must be an object with named values, "
            f"not {kind(call.arguments)}.",
        )
    request = tool.check(call.arguments, scene)
    return request if isinstance(request, Refusal) else (tool, request)


def shown(text: str) -> str:
    """Quotes a model's own word in a message: short, and printable whatever it holds."""
    return ascii(text if len(text) <= 40 else text[:40] + "...")


def kind(value: object) -> str:
    """Names the JSON kind of a value for a message."""
    match value:
        case bool():
            return "true or false"
        case None:
            return "null"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case _:
            return "a list"
