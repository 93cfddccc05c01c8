"""What a rollout engine is: the one door between episodes and whatever generates tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from reframe_vl.policy.model import VisionLanguageModel
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


@runtime_checkable
class SyncedEngine(Engine, Protocol):
    """An engine with weights of its own, which have to follow the trainer's.

    Its coroutines all run in one event loop, from ``start`` on.
    """

    @property
    def shared(self) -> bool:
        """Whether all ranks use the same one: then one of them pushes its weights."""

    async def start(self, device: torch.device) -> None:
        """Makes the engine ready to take weights and to generate.

        Args:
            device: The trainer's.

        Raises:
            EngineError: It cannot be started; the message names the remedy.
        """

    async def sync(self, model: VisionLanguageModel, version: int) -> None:
        """Takes the model's present weights over; nothing remembers the old ones afterwards.

        Args:
            model: The policy, as it was when the engine was made but for its weights.
            version: Optimiser steps that they have seen.

        Raises:
            EngineError: The engine could not be brought to take them.
        """

    async def rest(self) -> None:
        """Frees what is not needed until the next ``sync``."""


@runtime_checkable
class SharedEngine(SyncedEngine, Protocol):
    """A synced engine that several ranks may use: those that do not push have to know what was."""

    @property
    def served(self) -> str:
        """Names the weights that were pushed last; empty before."""

    async def follow(self, served: str) -> None:
        """Takes note of weights that another rank has pushed.

        Args:
            served: As that rank names them.
        """
