"""Tool calls as XML-like elements: the form of Qwen3.5."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reframe_vl.tools.base import ProposedCall, Reason, Refusal, shown
from reframe_vl.tools.json_values import decode

FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
FORM = "<function=NAME> <parameter=NAME> value </parameter> </function>"


@dataclass(frozen=True)
class XmlDialect:
    """A ``<function=...>`` element with ``<parameter=...>`` elements between the call's tags."""

    def tools_text(self, schemas: Sequence[str]) -> str:
        """The tool section of the Qwen3.5 chat template."""
        return "\n".join(
            (
                "# Tools\n",
                "You have access to the following functions:\n",
                "<tools>",
                *schemas,
                "</tools>\n",
                "If you choose to call a function ONLY reply in the following format with NO "
                "suffix:\n",
                "<tool_call>",
                "<function=example_function_name>",
                "<parameter=example_parameter_1>",
                "value_1",
                "</parameter>",
                "<parameter=example_parameter_2>",
                "This is the value for the second parameter",
                "that can span",
                "multiple lines",
                "</parameter>",
                "</function>",
                "</tool_call>\n",
                "<IMPORTANT>",
                "Reminder:",
                "- Function calls MUST follow the specified format: an inner "
                "<function=...></function> block must be nested within <tool_call></tool_call> XML "
                "tags",
                "- Required parameters MUST be specified",
                "- You may provide optional reasoning for your function call in natural language "
                "BEFORE the function call, but NOT after",
                "- If there is no function call available, answer the question like normal with "
                "your current knowledge and do not tell the user about function calls",
                "</IMPORTANT>",
            )
        )

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text between a call's tags."""
        lines = [f"{FUNCTION_OPEN}{name}>"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"{PARAMETER_OPEN}{key}>", text, PARAMETER_CLOSE]
        return "\n" + "\n".join([*lines, FUNCTION_CLOSE]) + "\n"

    def read(self, body: str) -> ProposedCall | Refusal:
        """Reads the text between a call's tags; never raises.

        A parameter's text is taken as JSON where it is JSON, else as it stands.
        """
        text = body.strip()
        if not text:
            return Refusal(Reason.EMPTY_CALL, f"The tool call is empty. Write {FORM}.")
        if text.startswith(PARAMETER_OPEN):
            return Refusal(Reason.NO_NAME, f"The tool call names no tool. Write {FORM}.")
        name, mark, text = text.removeprefix(FUNCTION_OPEN).partition(">")
        if not body.strip().startswith(FUNCTION_OPEN) or not mark or "<" in name:
            return _malformed(f"the call does not begin with {FUNCTION_OPEN}NAME>")
        if not name.strip():
            return Refusal(Reason.NO_NAME, f"The tool call names no tool. Write {FORM}.")
        arguments: dict[str, Any] = {}
        text = text.lstrip()
        while text.startswith(PARAMETER_OPEN):
            key, mark, text = text.removeprefix(PARAMETER_OPEN).partition(">")
            value, close, text = text.partition(PARAMETER_CLOSE)
            if not mark or not close or "<" in key or not key.strip():
                return _malformed(f"a {PARAMETER_OPEN}NAME> is not complete")
            key = key.strip()
            if key in arguments:
                return Refusal(
                    Reason.DUPLICATE_ARGUMENT, f"{shown(key)} is given twice; give it once."
                )
            arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"))
            text = text.lstrip()
        if not text.startswith(FUNCTION_CLOSE):
            return _malformed(f"{FUNCTION_CLOSE} is missing after the last parameter")
        if text.removeprefix(FUNCTION_CLOSE).strip():
            return Refusal(
                Reason.TRAILING_TEXT,
                "There is more text after the tool call's function. "
                "Write one function and nothing else between the tags.",
            )
        return ProposedCall(name.strip(), arguments, body)


def _value(text: str) -> Any:
    decoded = decode(text, Reason.NOT_JSON)
    if isinstance(decoded, Refusal) or decoded[1].strip():
        return text
    return decoded[0]


def _malformed(what: str) -> Refusal:
    return Refusal(Reason.NOT_XML, f"The tool call cannot be read: {what}. Write {FORM}.")
