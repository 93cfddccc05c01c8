"""An engine behind any endpoint that speaks OpenAI's chat completions: another model's actions.

An endpoint takes and gives text. So a context, which is the policy's own tokens, is turned into the
messages that it stands for, and what comes back is tokenised once, by the policy's tokenizer: ids
without log-probs, as if another author had written the turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

from reframe_vl.data.chat_endpoint import ChatEndpoint, EndpointSettings, image_part, text_part
from reframe_vl.data.verifiers.asker import Tally
from reframe_vl.data.verifiers.base import Reply
from reframe_vl.data.verifiers.cache import AnswerCache
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import EngineError, Generation
from reframe_vl.tools.codec import (
    PLACEHOLDER,
    TURN_CLOSE,
    TURN_OPEN,
    VIDEO_PLACEHOLDER,
    VISION_CLOSE,
    VISION_OPEN,
)
from reframe_vl.types import Context, Markup, Provenance, Quoted, Sampling, View

Message: TypeAlias = tuple[str, list[str | View]]
"""A role, and what it says and shows."""

_GIVE_UP_AFTER = 4
"""Requests in a row that failed after all their tries; then the others of a wave are not made."""
_THINK_CLOSE = "</think>\n\n"


class EndpointEngine:
    """Generates turns by asking an endpoint, several at once.

    Args:
        settings: Where and how.
        name: Of the model, for messages.
        encoder: Of the policy's tokenizer.
        opening: What the policy's template writes at the start of a turn.
        cache: Keeps answers by what was asked; None keeps none.
        tally: Counts requests, tokens, failures and cost.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        name: str,
        encoder: Encoder,
        opening: str = "",
        cache: AnswerCache | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.name, self.tally = name, tally or Tally()
        self._encoder, self._cache = encoder, cache
        # Inside a think block nothing would count as a call or an answer.
        self._prefix = _THINK_CLOSE if opening.endswith("<think>\n") else ""
        self._closing = threading.Event()
        self._endpoint = ChatEndpoint(settings, self._closing.wait)
        self._client = self._endpoint.client()
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix=name)
        self._failed_in_a_row = 0
        self._sessions: set[str] = set()

    # ------------------------------------------------------------------ Engine protocol

    def open(self, sessions: Sequence[str]) -> None:
        """Takes sessions up; the first ones begin a wave, which tries again what was given up."""
        if not self._sessions:
            self._failed_in_a_row = 0
        self._sessions.update(sessions)

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """Asks for the next turn after ``context``, or takes the kept answer.

        Raises:
            EngineError: There is no answer, or none that the policy could have written.
        """
        messages = conversation(context, self._encoder)
        fields = {"temperature": sampling.temperature, "seed": seed % 2**31}
        # An answer that is longer than a turn of the policy may be is cut as the policy's is.
        fields["max_tokens"] = max(self._endpoint.settings.max_tokens, sampling.max_new_tokens)
        key = self._key(messages, fields)
        reply = self._cache.get(key) if self._cache else None
        if reply is not None:
            self.tally.cached += 1
        else:
            reply = await self._ask(messages, fields)
            if self._cache and reply.text is not None:
                self._cache.put(key, reply)
        if reply.text is None:
            kind, sentence = reply.failure or ("", "no answer")
            raise EngineError(f"{self.name}: {kind}: {sentence}")
        return self._generation(reply.text, reply.finish == "length", sampling)

    def release(self, session: str) -> None:
        """Forgets a session; with the last one its wave ends."""
        self._sessions.discard(session)

    def close(self) -> None:
        """Ends waits between tries, and drops what was not yet begun."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    # ------------------------------------------------------------------ one turn

    async def _ask(self, messages: list[Message], fields: dict[str, Any]) -> Reply:
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._threads, self._complete, messages, fields)
        self.tally.add(reply)
        return reply

    def _complete(self, messages: list[Message], fields: dict[str, Any]) -> Reply:
        if self._failed_in_a_row >= _GIVE_UP_AFTER:
            sentence = f"not asked, since {_GIVE_UP_AFTER} requests in a row had failed"
            return Reply(None, ("given_up", sentence))
        reply = self._endpoint.complete(self._client, _rendered(messages), **fields)
        self._failed_in_a_row = 0 if reply.failure is None else self._failed_in_a_row + 1
        if reply.text is not None and not _first_turn(reply.text).strip():
            # Nothing was said, so nothing can be wrong: a filter, or all of it was reasoning.
            failure = ("empty", f"the answer is empty (finish reason {reply.finish})")
            return replace(reply, text=None, failure=failure)
        return reply

    def _generation(self, text: str, cut: bool, sampling: Sampling) -> Generation:
        # Halves of characters have no encoding; JSON can spell them.
        whole = _first_turn(text).encode(errors="replace").decode()
        if self._prefix and "</think>" not in whole:
            whole = self._prefix + whole
        ids = list(self._encoder.span([Quoted(whole)], Provenance.EXTERNAL).token_ids)
        if not cut:
            ids += self._encoder.span([Markup(TURN_CLOSE)], Provenance.EXTERNAL).token_ids
        cut = cut or len(ids) > sampling.max_new_tokens
        ids = ids[: sampling.max_new_tokens]
        if banned := set(ids) & set(sampling.banned_ids):
            raise EngineError(
                f"{self.name} wrote token {min(banned)}, which the policy can never write: it has "
                "no probability to learn."
            )
        return Generation(tuple(ids), (None,) * len(ids), "length" if cut else "stop")

    def _key(self, messages: list[Message], fields: dict[str, Any]) -> str:
        shown = [
            [role, [["view", p.hash] if isinstance(p, View) else ["text", p] for p in parts]]
            for role, parts in messages
        ]
        text = json.dumps([self._endpoint.identity, shown, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _first_turn(text: str) -> str:
    """What stands before the end of the turn, which some servers spell out."""
    return text.partition(TURN_CLOSE)[0]


def conversation(context: Context, encoder: Encoder) -> list[Message]:
    """The messages that a context stands for, without the turn that is to come.

    It is read by token ids: a question that spells a control token is no control token.
    """
    named = encoder.tokenizer.convert_tokens_to_ids
    opens, closes = named(TURN_OPEN), named(TURN_CLOSE)
    brackets = {named(VISION_OPEN), named(VISION_CLOSE)}
    placeholders = {named(PLACEHOLDER), named(VIDEO_PLACEHOLDER)}
    views = iter(context.views)
    messages: list[Message] = []
    parts: list[str | View] = []
    ids: list[int] = []

    def flush() -> None:
        if ids:
            parts.append(encoder.decode(ids))
            ids.clear()

    for token in context.token_ids:
        if token == opens:
            parts, ids = [], []
        elif token == closes:
            flush()
            role, _, words = str(parts[0]).partition("\n")
            messages.append((role, [words, *parts[1:]] if words else parts[1:]))
            parts, ids = [], []
        elif token in placeholders:
            flush()
            parts.append(next(views))
        elif token not in brackets:
            ids.append(token)
    return messages


def _rendered(messages: list[Message]) -> list[dict[str, Any]]:
    """As the API takes them; what is text alone stands as such."""
    rendered: list[dict[str, Any]] = []
    for role, parts in messages:
        if any(isinstance(part, View) for part in parts):
            content: Any = [piece for part in parts for piece in _pieces(part)]
        else:
            content = "".join(map(str, parts))
        rendered.append({"role": role, "content": content})
    return rendered


def _pieces(part: str | View) -> tuple[dict[str, Any], ...]:
    return (text_part(part),) if isinstance(part, str) else _pictures(part)


# The rollouts of a group show the same images.
@lru_cache(maxsize=64)
def _pictures(view: View) -> tuple[dict[str, Any], ...]:
    return tuple(image_part(frame) for frame in view.frames)
