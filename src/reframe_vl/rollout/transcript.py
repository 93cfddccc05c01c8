"""A rollout as text for people: what stood in its contexts, what was called, what it earned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from reframe_vl.types import CallRecord, Rollout, Span


def transcript(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> str:
    """Writes a rollout as Markdown.

    Whatever the policy or the world wrote stands in fenced blocks, so that its own Markdown, HTML
    or terminal codes are shown and not obeyed.
    """
    key = rollout.key
    facts = [
        f"sample      {key.sample_id}",
        f"rollout     {key.index} of step {key.step}, seed {key.seed}, policy of step "
        f"{rollout.policy_version}",
        f"ended       {rollout.termination}, {rollout.num_turns} turns",
        f"answers     {quoted(rollout.answers)}",
        f"reward      {reward_line(rollout)}",
        f"original    {drop_line(rollout)}",
    ]
    if rollout.error:
        facts.append(f"error       {_one_line(rollout.error)}")
    parts = ["## Rollout", _fenced("\n".join(map(_one_line, facts)))]
    for number, context in enumerate(rollout.contexts, 1):
        parts.append(f"### Context {number} of {len(rollout.contexts)}")
        for span in context.spans:
            parts.append(_heading(span))
            if not span.carried:
                parts.append(_fenced(decode(span.token_ids)))
    parts.append("### Calls")
    parts.append(_fenced("\n".join(map(call_line, rollout.calls))) if rollout.calls else "None.")
    return "\n\n".join(parts) + "\n"


def call_line(call: CallRecord) -> str:
    """A proposed call and what became of it, in one line of printable text."""
    words = [f"turn {call.turn}: {call.status}"]
    words += [f"({call.reason})"] if call.reason else []
    words += ["by the gate"] if call.by_gate else []
    words.append(f"{call.name or 'no tool'} {json.dumps(call.arguments, ensure_ascii=False)}")
    if call.boxes:
        boxes = (f"[{', '.join(f'{edge:g}' for edge in box)}]" for box in call.boxes)
        words.append(f"-> pixels {', '.join(boxes)}")
    if call.frames:
        words.append(f"-> frames {', '.join(map(str, call.frames))}")
    return _one_line(" ".join(words))


def reward_line(rollout: Rollout) -> str:
    """Total, components and advantage."""
    components = ", ".join(f"{name} {_score(value)}" for name, value in rollout.rewards.items())
    total = f"{_score(rollout.reward)} ({components})" if components else _score(rollout.reward)
    return f"{total}, advantage {_score(rollout.advantage)}"


def drop_line(rollout: Rollout) -> str:
    """Whether the original visual input left the context."""
    if rollout.dropped:
        return "dropped after the first successful call"
    return "kept, drop assigned but no call succeeded" if rollout.drop_assigned else "kept"


def printable(text: str) -> str:
    """Shows all characters that are not seen, line breaks excepted, as their escapes."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def quoted(answers: Sequence[str]) -> str:
    """Answers side by side."""
    return ", ".join(json.dumps(a, ensure_ascii=False) for a in answers) or "none"


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _heading(span: Span) -> str:
    words = [f"**{span.provenance}**", f"{len(span.token_ids)} tokens"]
    if span.views:
        words.append(f"images: {len(span.views)} ({span.num_visual_tokens} tokens)")
    if span.logprobs is not None:
        known = [value for value in span.logprobs if value is not None]
        words.append(f"log-probability {sum(known):.4g}")
    if span.carried:
        words.append("carried over from the context before")
    return ", ".join(words)


def _fenced(text: str) -> str:
    """Fences a text with more backticks than it has anywhere in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text)}\n{fence}"
