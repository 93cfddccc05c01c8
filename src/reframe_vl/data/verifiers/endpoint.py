"""A verifier behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import httpx2
from PIL import Image

from reframe_vl.data.media import MediaError
from reframe_vl.data.verifiers.base import Query, Reply
from reframe_vl.types import RGB

_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
"""Statuses that pass: too many requests, a server that starts or is overloaded."""


@dataclass(frozen=True)
class EndpointSettings:
    """Where and how to ask.

    Attributes:
        url: Up to and with ``/v1``.
        model: As the endpoint names it.
        api_key: Sent as a bearer token; empty sends none.
        concurrency: Requests under way at once.
        max_tries: Of a request that fails for a passing reason.
        timeout_s: Of one try.
        backoff_s: Before the second try; doubled for each further one, with jitter.
        longest_wait_s: Between two tries, whatever the endpoint asks for.
        max_tokens: Of an answer, with what the model thinks before it.
        price_in: Of a million prompt tokens.
        price_out: Of a million answer tokens.
        extra: Further fields of each request.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    concurrency: int = 16
    max_tries: int = 6
    timeout_s: float = 120.0
    backoff_s: float = 1.0
    longest_wait_s: float = 60.0
    max_tokens: int = 1024
    price_in: float = 0.0
    price_out: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.concurrency, self.max_tries, self.max_tokens) < 1:
            raise ValueError(
                f"Verifier {self.model}: concurrency, max_tries and max_tokens are at least 1."
            )


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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self.name = name or settings.model
        self._sleep = sleep

    @property
    def identity(self) -> str:
        """Model, address and what shapes an answer."""
        s = self.settings
        return json.dumps([s.url, s.model, s.max_tokens, s.extra], sort_keys=True)

    def answer(self, queries: Sequence[Query]) -> Iterator[tuple[int, Reply]]:
        """Yields replies as they come."""
        if not queries:
            return
        key = self.settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        pool = ThreadPoolExecutor(self.settings.concurrency)
        with httpx2.Client(headers=headers, timeout=self.settings.timeout_s) as client:
            try:
                jobs = {pool.submit(self._one, client, q): n for n, q in enumerate(queries)}
                for job in as_completed(jobs):
                    yield jobs[job], job.result()
            finally:
                # Whoever stops listening does not wait for what was not yet begun.
                pool.shutdown(cancel_futures=True)

    def _one(self, client: httpx2.Client, query: Query) -> Reply:
        try:
            body = self._body(query)
        except MediaError as error:
            return Reply(None, ("media", str(error)))
        url = f"{self.settings.url.rstrip('/')}/chat/completions"
        for tried in range(1, self.settings.max_tries + 1):
            asked_wait = None
            try:
                response = client.post(url, json=body)
            except httpx2.TransportError as error:
                timed_out = isinstance(error, httpx2.TimeoutException)
                failure = (
                    "timeout" if timed_out else "connection",
                    f"{url}: {type(error).__name__}: {error}. Is the endpoint up?",
                )
            else:
                if response.status_code == 200:
                    return self._read(response, tried)
                failure = (
                    f"http_{response.status_code}",
                    f"{url} answered {response.status_code}: {response.text[:200]}",
                )
                if response.status_code not in _AGAIN:
                    return Reply(None, failure, tried)
                asked_wait = response.headers.get("Retry-After")
            if tried < self.settings.max_tries:
                self._sleep(self._wait(tried, asked_wait))
        return Reply(None, failure, self.settings.max_tries)

    def _wait(self, tried: int, asked: str | None) -> float:
        wait = self.settings.backoff_s * 2 ** (tried - 1) * random.uniform(0.5, 1.0)
        if asked is not None and asked.replace(".", "", 1).isdigit():
            wait = max(wait, float(asked))
        return min(wait, self.settings.longest_wait_s)

    def _body(self, query: Query) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for picture, pixels in zip(query.pictures, query.pixels(), strict=True):
            if picture.caption:
                content.append({"type": "text", "text": picture.caption})
            content.append({"type": "image_url", "image_url": {"url": _data_url(pixels)}})
        content.append({"type": "text", "text": query.text})
        return {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self.settings.max_tokens,
            **self.settings.extra,
        }

    def _read(self, response: httpx2.Response, tried: int) -> Reply:
        try:
            body = response.json()
            choice = body["choices"][0]
            text = choice["message"].get("content") or ""
            usage = body.get("usage") or {}
            tokens_in = int(usage.get("prompt_tokens") or 0)
            tokens_out = int(usage.get("completion_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            message = f"no chat completion: {response.text[:200]} ({error})"
            return Reply(None, ("malformed", message), tried)
        cost = (tokens_in * self.settings.price_in + tokens_out * self.settings.price_out) / 1e6
        cut = choice.get("finish_reason") == "length" and "</answer>" not in text
        failure = None
        if cut:
            failure = ("truncated", f"cut after {tokens_out} tokens: raise max_tokens.")
        return Reply(None if cut else text, failure, tried, tokens_in, tokens_out, cost)


def _data_url(pixels: RGB) -> str:
    stream = io.BytesIO()
    Image.fromarray(_at_least(pixels, 28)).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _at_least(pixels: RGB, side: int) -> RGB:
    """Enlarges tiny pictures in whole steps: vision models refuse those below a patch."""
    factor = math.ceil(side / min(pixels.shape[:2]))
    return pixels if factor <= 1 else pixels.repeat(factor, 0).repeat(factor, 1)
