"""Tool calls as JSON objects: the form of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reframe_vl.tools.base import ProposedCall, Reason, Refusal, kind
from reframe_vl.tools.json_values import decode

FORM = '{"name": "<function-name>", "arguments": {...}}'


@dataclass(frozen=True)
class JsonDialect:
    """One JSON object with ``name`` and ``arguments`` between the call's tags.

    Attributes:
        compact: Written without white space.
    """

    compact: bool = False

    def tools_text(self, schemas: Sequence[str]) -> str:
        """The tool section of the Qwen3-VL chat template."""
        return "\n".join(
            (
                "# Tools\n",
                "You may call one or more functions to assist with the user query.\n",
                "You are provided with function signatures within <tools></tools> XML tags:",
                "<tools>",
                *schemas,
                "</tools>\n",
                "For each function call, return a json object with function name and arguments "
                "within <tool_call></tool_call> XML tags:",
                "<tool_call>",
                '{"name": <function-name>, "arguments": <args-json-object>}',
                "</tool_call>",
            )
        )

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text between a call's tags."""
        call = {"name": name, "arguments": dict(arguments)}
        if self.compact:
            return json.dumps(call, ensure_ascii=False, separators=(",", ":"))
        return f"\n{json.dumps(call, ensure_ascii=False)}\n"

    def read(self, body: str) -> ProposedCall | Refusal:
        """Reads the text between a call's tags; never raises."""
        if not body.strip():
            return Refusal(Reason.EMPTY_CALL, f"The tool call is empty. Write {FORM}.")
        decoded = decode(body, Reason.NOT_JSON)
        if isinstance(decoded, Refusal):
            return Refusal(decoded.reason, f"{decoded.message} Write {FORM}.")
        call, rest = decoded
        if not isinstance(call, dict):
            return Refusal(
                Reason.NOT_AN_OBJECT, f"The tool call is {kind(call)}, not an object. Write {FORM}."
            )
        if rest.strip():
            return Refusal(
                Reason.TRAILING_TEXT,
                "There is more text after the tool call's object. "
                "Write one object and nothing else between the tags.",
            )
        name = call.get("name")
        if not isinstance(name, str) or not name.strip():
            return Refusal(Reason.NO_NAME, f"The tool call names no tool. Write {FORM}.")
        arguments = _arguments(call.get("arguments", {}))
        if isinstance(arguments, Refusal):
            return arguments
        return ProposedCall(_whole(name.strip()), arguments, body)


def _arguments(value: Any) -> Any:
    """Accepts arguments that were encoded once more, as APIs pass them; none is an empty object."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    decoded = decode(_whole(value), Reason.BAD_ARGUMENTS_JSON)
    if isinstance(decoded, Refusal):
        return Refusal(decoded.reason, f"In the arguments: {decoded.message}")
    arguments, rest = decoded
    if rest.strip():
        return Refusal(
            Reason.BAD_ARGUMENTS_JSON, "In the arguments: there is more text after the object."
        )
    return arguments


def _whole(text: str) -> str:
    """Replaces halves of characters: JSON escapes spell them, no file and no tokenizer takes them.

    In arguments that are decoded once more, two halves could also meet and become one character
    only when they are written down and read back.
    """
    return text.encode(errors="replace").decode()
