"""What a rollout engine is: the one door between episodes and whatever generates tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from reframe_vl.types import Context, Sampling


class EngineError(RuntimeError):
    """The engine failed: the rollout is not scorable, and nobody's answer was wrong."""


@dataclass(frozen=True)
class Generation:
    """One sampled turn.

    Attributes:
        token_ids: Sampled ids, the stop id included.
        logprobs: Of the distribution sampled from; None where the engine gave none.
        finish: ``length`` where the turn's token limit cut it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish: Literal["stop", "length"]


@runtime_checkable
class Engine(Protocol):
    """Generates turns for many episodes at once.

    A session is one rollout. All sessions of a wave are opened before its episodes start, so
    that an engine that batches knows for whom it waits, and results never depend on timing.
    """

    def open(self, sessions: Sequence[str]) -> None:
        """Announces sessions."""

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """Samples the next turn after ``context``; what a session's cache holds is not redone.

        Raises:
            EngineError: The engine could not generate.
        """

    def release(self, session: str) -> None:
        """Ends a session and frees its cache."""

    def close(self) -> None:
        """Frees everything."""
