"""A client of any endpoint that speaks OpenAI's chat completions.

It asks in a blocking way and tries again where the endpoint falters; whoever asks several things at
once does so in threads.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import httpx2
from PIL import Image

from reframe_vl.data.verifiers.base import Reply
from reframe_vl.types import RGB

_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
"""Statuses that pass: too many requests, a server that starts or is overloaded."""

_MOST_BYTES = 2**26
"""Of an answer: what is longer than any completion is not read to its end."""

_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""What reading something else than a completion raises; the last by JSON of great depth."""


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
                f"Endpoint of {self.model}: concurrency, max_tries and max_tokens are at least 1."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], place: str) -> EndpointSettings:
        """Reads settings of a config, whose ``api_key_env`` names the variable with the key.

        Raises:
            ValueError: A setting is unknown or missing, or there is no such variable.
        """
        settings = dict(given)
        variable = settings.pop("api_key_env", None)
        known = {entry.name for entry in fields(cls)} - {"api_key"}
        if settings.keys() - known or not {"url", "model"} <= settings.keys():
            raise ValueError(
                f"{place}: give url and model of an endpoint, api_key_env where it needs a key, "
                f"and of {', '.join(sorted(known))} what else is needed. A key itself must not "
                "stand in a config, which runs write down."
            )
        for name, value in settings.items():
            _check_setting(f"{place}.{name}", name, value)
        if variable is not None and not os.environ.get(str(variable)):
            raise ValueError(f"{place}: the environment has no variable {variable} with the key.")
        key = os.environ[str(variable)].strip() if variable is not None else ""
        if not (key.isascii() and key.isprintable()):
            # The client would say so with the key itself, which then stands in the log.
            raise ValueError(
                f"{place}: the key in {variable} has characters that no header can hold: only "
                "printable ASCII can be sent."
            )
        return cls(**settings, api_key=key)


def _check_setting(place: str, name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in ("url", "model"):
        fits, wanted = isinstance(value, str) and bool(value), "text"
    elif name in ("concurrency", "max_tries", "max_tokens"):
        fits, wanted = is_number and isinstance(value, int), "a whole number"
    elif name == "extra":
        fits, wanted = isinstance(value, Mapping), "further fields of a request, by name"
    else:
        fits, wanted = is_number and 0 <= float(str(value)) < math.inf, "a number of at least 0"
    if not fits:
        raise ValueError(f"{place} is {value!r}: give {wanted}.")


@dataclass(frozen=True)
class _Response:
    status: int
    retry_after: str | None
    content: bytes

    @property
    def beginning(self) -> str:
        """For a message."""
        return self.content[:200].decode(errors="replace")


class ChatEndpoint:
    """Asks an endpoint.

    Args:
        settings: Where and how.
        sleep: Waits between tries.
    """

    def __init__(
        self, settings: EndpointSettings, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.settings = settings
        self._sleep = sleep
        self._url = f"{settings.url.rstrip('/')}/chat/completions"

    @property
    def identity(self) -> str:
        """Model, address and what shapes an answer."""
        s = self.settings
        return json.dumps([s.url, s.model, s.max_tokens, s.extra], sort_keys=True)

    def client(self) -> httpx2.Client:
        """Connections, for several threads; to be closed."""
        key = self.settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(headers=headers, timeout=self.settings.timeout_s)

    def complete(
        self, client: httpx2.Client, messages: list[dict[str, Any]], **fields: Any
    ) -> Reply:
        """What the endpoint answers; a failure is told in the reply.

        Args:
            client: Of this endpoint.
            messages: The conversation.
            fields: More fields of the request; those that the settings name are theirs, and null
                leaves one out.
        """
        body = {
            "model": self.settings.model,
            "messages": messages,
            "max_tokens": self.settings.max_tokens,
            **fields,
            **self.settings.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        for tried in range(1, self.settings.max_tries + 1):
            asked_wait = None
            try:
                response = self._post(client, body)
            except httpx2.RequestError as error:
                timed_out = isinstance(error, httpx2.TimeoutException)
                failure = (
                    "timeout" if timed_out else "connection",
                    f"{self._url}: {type(error).__name__}: {error}. Is the endpoint up?",
                )
            else:
                if response.status == 200:
                    return self._read(response, tried)
                failure = (
                    f"http_{response.status}",
                    f"{self._url} answered {response.status}: {response.beginning}",
                )
                if response.status not in _AGAIN:
                    return Reply(None, failure, tried)
                asked_wait = response.retry_after
            if tried < self.settings.max_tries:
                self._sleep(self._wait(tried, asked_wait))
        return Reply(None, failure, self.settings.max_tries)

    def _post(self, client: httpx2.Client, body: dict[str, Any]) -> _Response:
        """One try. The client's own limit is for each read: bytes that drip would hold it for ever.

        Raises:
            httpx2.RequestError: No whole answer came, or none in time.
        """
        end = time.monotonic() + self.settings.timeout_s
        content = bytearray()
        with client.stream("POST", self._url, json=body) as response:
            for chunk in response.iter_bytes():
                content += chunk
                if time.monotonic() > end:
                    raise httpx2.ReadTimeout(f"no whole answer in {self.settings.timeout_s:g} s")
                if len(content) > _MOST_BYTES:
                    break
        return _Response(response.status_code, response.headers.get("Retry-After"), bytes(content))

    def _wait(self, tried: int, asked: str | None) -> float:
        wait = self.settings.backoff_s * 2 ** (tried - 1) * random.uniform(0.5, 1.0)
        if asked is not None and asked.isascii() and asked.replace(".", "", 1).isdigit():
            wait = max(wait, float(asked))
        return min(wait, self.settings.longest_wait_s)

    def _read(self, response: _Response, tried: int) -> Reply:
        try:
            body = json.loads(response.content)
            choice = body["choices"][0]
            text = choice["message"].get("content") or ""
            finish = str(choice.get("finish_reason") or "stop")
            if not isinstance(text, str):
                raise TypeError("the content is no text")
        except _MALFORMED as error:
            message = f"no chat completion: {response.beginning} ({error})"
            return Reply(None, ("malformed", message), tried)
        tokens_in, tokens_out = (
            _count(body.get("usage"), name) for name in ("prompt_tokens", "completion_tokens")
        )
        cost = (tokens_in * self.settings.price_in + tokens_out * self.settings.price_out) / 1e6
        return Reply(text, None, tried, tokens_in, tokens_out, cost, finish)


def _count(usage: object, name: str) -> int:
    """A number of tokens; 0 where none is told, or what is told can be none."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value < 2**53 else 0


def image_part(pixels: RGB) -> dict[str, Any]:
    """An image as a part of a message's content."""
    stream = io.BytesIO()
    Image.fromarray(_at_least(pixels, 28)).save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def text_part(text: str) -> dict[str, Any]:
    """Text as a part of a message's content."""
    return {"type": "text", "text": text}


def _at_least(pixels: RGB, side: int) -> RGB:
    """Enlarges tiny pictures in whole steps: vision models refuse those below a patch."""
    factor = math.ceil(side / min(pixels.shape[:2]))
    return pixels if factor <= 1 else pixels.repeat(factor, 0).repeat(factor, 1)
