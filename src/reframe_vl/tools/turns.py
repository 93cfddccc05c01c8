"""Splits an assistant turn into its think blocks, tool calls and answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from reframe_vl.tools.base import ProposedCall, Reason, Refusal

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_CLOSING = {"<think>": "</think>", CALL_OPEN: CALL_CLOSE, "<answer>": "</answer>"}
_OPENING = re.compile("|".join(_CLOSING))


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What an assistant turn says, outside its think blocks; at most one of call and refusal.

    A turn with neither, and no answers, is a turn without an answer.

    Attributes:
        answers: The contents of all answer blocks, stripped. They stand beside a refusal where the
            turn both called and answered: the refusal comes first.
        call_start: Where the first call's opening tag begins in the text, readable call or not;
            None where no call was attempted.
    """

    call: ProposedCall | None = None
    refusal: Refusal | None = None
    answers: tuple[str, ...] = ()
    call_start: int | None = None


def read_turn(
    text: str,
    read: Callable[[str], ProposedCall | Refusal],
    *,
    truncated: bool,
    thinking: bool,
) -> ParsedTurn:
    """Reads a turn; what stands inside one block is never taken for another block.

    Args:
        text: The turn without its end token.
        read: Reads the text between a call's tags.
        truncated: The turn was cut by the token limit.
        thinking: The turn begins inside a think block that the prompt opened.
    """
    answers: list[str] = []
    bodies: list[str | None] = []
    call_start = None
    answers_close = True
    position = _after(text, "</think>", 0) if thinking else 0
    while opening := _OPENING.search(text, position):
        tag = opening.group()
        # Looked for in vain once only: a turn may open thousands of answers.
        look = tag != "<answer>" or answers_close
        end = text.find(_CLOSING[tag], opening.end()) if look else -1
        body = text[opening.end() : end] if end >= 0 else None
        if tag == CALL_OPEN:
            bodies.append(body)
            call_start = opening.start() if call_start is None else call_start
        elif tag == "<answer>" and body is not None:
            answers.append(body.strip())
        if body is not None:
            position = end + len(_CLOSING[tag])
        elif tag == "<answer>":
            answers_close = False
            position = opening.end()
        else:
            break
    outcome = _outcome(bodies, bool(answers), read, truncated)
    return ParsedTurn(
        call=outcome if isinstance(outcome, ProposedCall) else None,
        refusal=outcome if isinstance(outcome, Refusal) else None,
        answers=tuple(answers),
        call_start=call_start,
    )


def _after(text: str, tag: str, position: int) -> int:
    found = text.find(tag, position)
    return len(text) if found < 0 else found + len(tag)


def _outcome(
    bodies: list[str | None],
    answered: bool,
    read: Callable[[str], ProposedCall | Refusal],
    truncated: bool,
) -> ProposedCall | Refusal | None:
    if not bodies:
        return None
    if len(bodies) > 1:
        return Refusal(
            Reason.SEVERAL_CALLS,
            f"The turn has {len(bodies)} tool calls. Call one tool, look at what it returns, "
            "then call the next.",
        )
    if answered:
        return Refusal(
            Reason.CALL_WITH_ANSWER,
            "The turn has a tool call and an answer. Either call a tool or answer.",
        )
    body = bodies[0]
    if body is not None:
        return read(body)
    if truncated:
        return Refusal(
            Reason.TRUNCATED_CALL,
            "The tool call was cut off by the limit on a turn's length. Write a shorter turn.",
        )
    return Refusal(Reason.UNCLOSED_CALL, f"The tool call does not end: close it with {CALL_CLOSE}.")
