"""Asks a verifier: each query once, kept answers never again, and everything counted."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reframe_vl.data.verifiers.base import Query, Reply, Verifier
from reframe_vl.data.verifiers.cache import AnswerCache

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """What asking came to.

    Attributes:
        answered: Queries that the verifier answered.
        cached: Queries whose answer was kept from before.
        retries: Requests that had to be made again.
        failures: Queries without an answer, by the kind of failure.
        cost: Of all answers, in the currency of the verifier's prices.
    """

    answered: int = 0
    cached: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, reply: Reply) -> None:
        """Counts a reply of the verifier."""
        self.retries += reply.tries - 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.cost += reply.cost
        if reply.failure is None:
            self.answered += 1
        else:
            self.failures[reply.failure[0]] += 1

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self) | {"failures": dict(self.failures)}

    def resume(self, earlier: dict[str, Any]) -> None:
        """Goes on counting where an earlier run stopped."""
        self.failures.update(earlier["failures"])
        for name, value in earlier.items():
            if name != "failures":
                setattr(self, name, getattr(self, name) + value)


class Asker:
    """A verifier as the stages use it.

    Args:
        verifier: Who answers.
        cache: Keeps answers; None keeps none.
    """

    def __init__(self, verifier: Verifier, cache: AnswerCache | None = None) -> None:
        self.verifier = verifier
        self.cache = cache
        self.tally = Tally()

    @property
    def name(self) -> str:
        """Of the verifier."""
        return self.verifier.name

    def ask(self, queries: Sequence[Query]) -> list[Reply]:
        """The replies, in the order of the queries; equal queries are asked once."""
        keys = [self._key(query) for query in queries]
        replies: dict[str, Reply] = {}
        for key in keys:
            kept = self.cache.get(key) if self.cache and key not in replies else None
            if kept is not None:
                replies[key] = kept
                self.tally.cached += 1
        new = {key: query for key, query in zip(keys, queries, strict=True) if key not in replies}
        order = list(new)
        for position, reply in self.verifier.answer(list(new.values())):
            self.tally.add(reply)
            replies[order[position]] = reply
            if reply.failure is not None:
                logger.warning("%s gave no answer: %s", self.name, reply.failure[1])
            elif self.cache is not None:
                self.cache.put(order[position], reply)
        return [replies[key] for key in keys]

    def _key(self, query: Query) -> str:
        text = f"{self.verifier.identity}\0{query.identity}"
        return hashlib.sha256(text.encode()).hexdigest()
