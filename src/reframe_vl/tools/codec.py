"""How a model family writes and reads a conversation with tools.

The codec knows the chat layout, the family's tool section and call syntax, and the coordinate frame
that its boxes are in. It deals in text and parts; tokens belong to the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from reframe_vl.tools.base import ProposedCall, Refusal, Tool
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.qwen_json import JsonDialect
from reframe_vl.tools.qwen_xml import XmlDialect
from reframe_vl.tools.turns import CALL_CLOSE, CALL_OPEN, ParsedTurn, read_turn
from reframe_vl.types import Markup, Part, View

TURN_OPEN = "<|im_start|>"
TURN_CLOSE = "<|im_end|>"
VISION_OPEN, VISION_CLOSE = "<|vision_start|>", "<|vision_end|>"
PLACEHOLDER, VIDEO_PLACEHOLDER = "<|image_pad|>", "<|video_pad|>"
STOP_STRINGS = (TURN_CLOSE,)
BANNED_STRINGS = (
    PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    "<|vision_pad|>",
    VISION_OPEN,
    VISION_CLOSE,
    TURN_OPEN,
    "<|endoftext|>",
    "<|pad|>",
)
"""Special tokens that a policy may never sample: their count must equal that of the images, and a
turn ends in one way only. Those that a tokenizer does not have are skipped by whoever looks up ids.
"""

VideoForm: TypeAlias = Literal["patches", "block"]
"""How a family writes a native video: each temporal patch by itself, after its time, or all of them
in one block, whose times only the positions tell."""


@runtime_checkable
class Dialect(Protocol):
    """The syntax of a family's tool section and tool calls."""

    def tools_text(self, schemas: Sequence[str]) -> str:
        """The tool section of the system prompt; one line of JSON a tool."""

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text between a call's tags."""

    def read(self, body: str) -> ProposedCall | Refusal:
        """Reads the text between a call's tags; never raises."""


@dataclass(frozen=True)
class Codec:
    """The chat layout and call syntax of one model family (make one with :func:`codec_for`).

    Attributes:
        frame: What the numbers of the model's boxes mean.
        opening: What the template writes at the start of every assistant turn.
        tools_first: The tool section stands before the system prompt's words, not after.
        video: How a native video is written; None where there is no such form.
    """

    dialect: Dialect
    frame: CoordinateFrame
    opening: str = ""
    tools_first: bool = False
    video: VideoForm | None = None

    def tools_text(self, tools: Sequence[Tool]) -> str:
        """The tool section of the system prompt, in the family's own words."""
        return self.dialect.tools_text(
            [json.dumps(_without_nulls(t.schema(self.frame)), ensure_ascii=False) for t in tools]
        )

    def system_text(self, words: str, tools: Sequence[Tool]) -> str:
        """The system prompt: ``words`` and the tool section, in the family's order."""
        section = self.tools_text(tools) if tools else ""
        parts = (section, words) if self.tools_first else (words, section)
        return "\n\n".join(part for part in parts if part)

    def prompt(self, system: str, user: Sequence[Part]) -> list[Part]:
        """The first messages, up to where the assistant's first turn begins."""
        head = f"{TURN_OPEN}system\n{system}{TURN_CLOSE}\n" if system else ""
        return _join(Markup(f"{head}{TURN_OPEN}user\n"), *user, Markup(self._next_turn))

    def observation(self, parts: Sequence[Part], *, close_turn: bool = False) -> list[Part]:
        """What follows an assistant turn that called a tool, up to where the next turn begins.

        The images stand in a user message: templates and chat APIs drop or refuse them elsewhere.

        Args:
            parts: The tool's words as ``Quoted`` and its images as ``View``.
            close_turn: The turn was cut before its own end token, which is then written here.
        """
        close = TURN_CLOSE if close_turn else ""
        return _join(
            Markup(f"{close}\n{TURN_OPEN}user\n<tool_response>\n"),
            *parts,
            Markup(f"\n</tool_response>{self._next_turn}"),
        )

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call, from its opening tag through the end of the turn."""
        return f"{CALL_OPEN}{self.dialect.render(name, arguments)}{CALL_CLOSE}{TURN_CLOSE}"

    def render_answer(self, text: str) -> str:
        """An answer, through the end of the turn."""
        return f"<answer>{text}</answer>{TURN_CLOSE}"

    def parse(self, text: str, truncated: bool) -> ParsedTurn:
        """Reads an assistant turn; never raises.

        Args:
            text: The turn as sampled, with or without its end token.
            truncated: The turn was cut by the token limit.
        """
        return read_turn(
            text.partition(TURN_CLOSE)[0],
            self.dialect.read,
            truncated=truncated,
            thinking=self.opening.endswith("<think>\n"),
        )

    @property
    def _next_turn(self) -> str:
        return f"{TURN_CLOSE}\n{TURN_OPEN}assistant\n{self.opening}"


def codec_for(
    family: str,
    frame: CoordinateFrame | None = None,
    thinking: bool = False,
    compact: bool = False,
) -> Codec:
    """Makes the codec of a model family.

    Args:
        family: ``qwen3_vl``, ``qwen2_5_vl`` or ``qwen3_5``.
        frame: Overrides the family's own coordinate frame.
        thinking: The template opens a think block at the start of every turn.
        compact: Calls without white space, for the JSON families: fewer tokens for a small model.

    Raises:
        ValueError: If the family is unknown or does not have the asked-for form.
    """
    match family:
        case "qwen3_vl":
            codec = Codec(
                JsonDialect(compact),
                CoordinateFrame.GRID_1000,
                opening="<think>\n" if thinking else "",
                video="patches",
            )
        case "qwen2_5_vl":
            if thinking:
                raise ValueError("qwen2_5_vl has no thinking form: set thinking to false.")
            codec = Codec(JsonDialect(compact), CoordinateFrame.PIXEL_FED, video="block")
        case "qwen3_5":
            if compact:
                raise ValueError("qwen3_5 calls have no compact form: set compact to false.")
            codec = Codec(
                XmlDialect(),
                CoordinateFrame.GRID_1000,
                opening="<think>\n" if thinking else "<think>\n\n</think>\n\n",
                tools_first=True,
                video="patches",
            )
        case _:
            raise ValueError(
                f"Unknown model family {family!r}: choose qwen3_vl, qwen2_5_vl or qwen3_5."
            )
    return codec if frame is None else replace(codec, frame=frame)


def _join(*parts: Part) -> list[Part]:
    """Puts vision tags around views and merges neighbouring markup."""
    joined: list[Part] = []
    for part in parts:
        tagged: tuple[Part, ...] = (
            (Markup(VISION_OPEN), part, Markup(VISION_CLOSE)) if isinstance(part, View) else (part,)
        )
        for piece in tagged:
            if isinstance(piece, Markup) and joined and isinstance(joined[-1], Markup):
                joined[-1] = Markup(joined[-1].text + piece.text)
            else:
                joined.append(piece)
    return joined


def _without_nulls(value: Any) -> Any:
    """Drops null entries, which a table of several schemas fills each one's missing keys with."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
