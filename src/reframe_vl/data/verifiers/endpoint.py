"""A verifier behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import httpx2

from reframe_vl.data.chat_endpoint import ChatEndpoint, EndpointSettings, image_part, text_part
from reframe_vl.data.media import MediaError
from reframe_vl.data.verifiers.base import Query, Reply


class EndpointVerifier:
    """Asks several queries at once, greedily, and tries again where the endpoint falters.

    Args:
        settings: Where and how.
        name: For reports; the model's by default.
        sleep: Waits between tries.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        name: str | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.settings = settings
        self.name = name or settings.model
        self._endpoint = ChatEndpoint(settings, sleep)

    @property
    def identity(self) -> str:
        """Model, address and what shapes an answer."""
        return self._endpoint.identity

    def answer(self, queries: Sequence[Query]) -> Iterator[tuple[int, Reply]]:
        """Yields replies as they come."""
        if not queries:
            return
        pool = ThreadPoolExecutor(self.settings.concurrency)
        with self._endpoint.client() as client:
            try:
                jobs = {pool.submit(self._one, client, q): n for n, q in enumerate(queries)}
                for job in as_completed(jobs):
                    yield jobs[job], job.result()
            finally:
                # Whoever stops listening does not wait for what was not yet begun.
                pool.shutdown(cancel_futures=True)

    def _one(self, client: httpx2.Client, query: Query) -> Reply:
        try:
            content = _content(query)
        except MediaError as error:
            return Reply(None, ("media", str(error)))
        messages = [{"role": "user", "content": content}]
        reply = self._endpoint.complete(client, messages, temperature=0.0)
        if reply.text is None or reply.finish != "length" or "</answer>" in reply.text:
            return reply
        failure = ("truncated", f"cut after {reply.completion_tokens} tokens: raise max_tokens.")
        return replace(reply, text=None, failure=failure)


def _content(query: Query) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for picture, pixels in zip(query.pictures, query.pixels(), strict=True):
        if picture.caption:
            content.append(text_part(picture.caption))
        content.append(image_part(pixels))
    return [*content, text_part(query.text)]
