"""A verifier of the data pipeline that runs here: a policy's own engine, decoding greedily."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

from reframe_vl.data.media import MediaError
from reframe_vl.data.verifiers.base import Query, Reply
from reframe_vl.policy.loading import Policy
from reframe_vl.policy.views import ViewError
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Engine, EngineError, Generation
from reframe_vl.tools.codec import TURN_CLOSE
from reframe_vl.types import Context, Part, Provenance, Quoted


class LocalVerifier:
    """Answers queries with a loaded policy, without tools.

    Args:
        policy: Speaks for the model.
        engine: Generates with it.
        name: For reports.
        max_new_tokens: Of an answer, with what the model thinks before it.
        max_concurrent: Queries that are answered together.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        name: str,
        max_new_tokens: int = 512,
        max_concurrent: int = 32,
    ) -> None:
        self.name = name
        self.max_concurrent = max_concurrent
        self._policy = policy
        self._engine = engine
        self._encoder = Encoder(policy.tokenizer)
        self._sampling = policy.sampling(0.0, max_new_tokens)

    @property
    def identity(self) -> str:
        """The checkpoint's path and what shapes an answer."""
        codec = self._policy.codec
        shape = [self._policy.path, codec.opening, self._sampling.max_new_tokens]
        return json.dumps(shape)

    def answer(self, queries: Sequence[Query]) -> Iterator[tuple[int, Reply]]:
        """Answers in waves, in order."""
        for start in range(0, len(queries), self.max_concurrent):
            contexts: dict[int, Context] = {}
            for number, query in list(enumerate(queries))[start : start + self.max_concurrent]:
                try:
                    contexts[number] = self._context(query)
                except (MediaError, ViewError) as error:
                    yield number, Reply(None, ("media", str(error)))
            yield from asyncio.run(self._wave(contexts)).items()

    def _context(self, query: Query) -> Context:
        parts: list[Part] = []
        for picture, pixels in zip(query.pictures, query.pixels(), strict=True):
            if picture.caption:
                parts.append(Quoted(picture.caption))
            parts.append(self._policy.model.view_maker.view(pixels, picture.max_pixels))
        parts.append(Quoted(query.text))
        prompt = self._policy.codec.prompt("", parts)
        return Context([self._encoder.span(prompt, Provenance.PROMPT)])

    async def _wave(self, contexts: dict[int, Context]) -> dict[int, Reply]:
        self._engine.open([str(number) for number in contexts])
        replies = await asyncio.gather(*(self._one(n, c) for n, c in contexts.items()))
        return dict(zip(contexts, replies, strict=True))

    async def _one(self, number: int, context: Context) -> Reply:
        try:
            generation = await self._engine.generate(str(number), context, self._sampling, seed=0)
        except EngineError as error:
            return Reply(None, ("engine", str(error)))
        finally:
            self._engine.release(str(number))
        return self._read(generation, len(context))

    def _read(self, generation: Generation, prompt_tokens: int) -> Reply:
        text = self._encoder.decode(generation.token_ids).partition(TURN_CLOSE)[0]
        text = text.rpartition("</think>")[2]
        count = len(generation.token_ids)
        if generation.finish == "length" and "</answer>" not in text:
            failure = ("truncated", f"cut after {count} tokens: raise max_tokens.")
            return Reply(None, failure, 1, prompt_tokens, count)
        return Reply(text, None, 1, prompt_tokens, count)
