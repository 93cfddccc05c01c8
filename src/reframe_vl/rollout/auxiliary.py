"""Auxiliary models (docs/method.md, 1.5): whole rollouts of others, played as the policy's are.

They go through the same prompts, tools and episodes, with another engine. What they write has the
provenance *external*, and their name is part of the rollouts' keys. One that fails leaves a rollout
without a reward: the pool is smaller by it, and nobody was wrong.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from reframe_vl.data.chat_endpoint import EndpointSettings
from reframe_vl.data.verifiers.asker import Tally
from reframe_vl.data.verifiers.cache import AnswerCache
from reframe_vl.policy.loading import Policy, load_policy
from reframe_vl.policy.teacher_folders import checkpoint_folder
from reframe_vl.rollout.collector import Collector, Plan
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.endpoint_engine import EndpointEngine
from reframe_vl.rollout.engine import Engine, Generation
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.types import Context, RolloutGroup, Sampling, Termination

logger = logging.getLogger(__name__)

_LOCAL = frozenset(("checkpoint", "dtype", "offload", "max_batch_size"))


class Auxiliary(ABC):
    """A model whose rollouts join the policy's.

    Attributes:
        name: Of the model; it stands in the rollouts' keys.
        tally: What it was asked for and what it cost.
        has_logprobs: Whether it says how probable its tokens were.
    """

    has_logprobs = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.tally = Tally()

    @abstractmethod
    def connect(self, policy: Policy) -> None:
        """Makes it ready to write in the policy's tokens."""

    @abstractmethod
    @contextmanager
    def at_work(self) -> Iterator[Engine]:
        """Its engine, for as long as the context lasts."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; it may be closed twice."""


class EndpointAuxiliary(Auxiliary):
    """A model behind an endpoint.

    Args:
        name: Of the model.
        settings: Where and how.
        cache: A file that keeps its answers, by what was asked; None keeps none.
    """

    def __init__(self, name: str, settings: EndpointSettings, cache: Path | None = None) -> None:
        super().__init__(name)
        self._settings, self._cache = settings, cache
        self._engine: EndpointEngine | None = None

    def connect(self, policy: Policy) -> None:
        """Opens the cache and the connections."""
        self._engine = EndpointEngine(
            self._settings,
            self.name,
            Encoder(policy.tokenizer),
            policy.codec.opening,
            AnswerCache(self._cache) if self._cache else None,
            self.tally,
        )

    @contextmanager
    def at_work(self) -> Iterator[Engine]:
        """The engine: there is nothing to bring in."""
        yield _connected(self._engine, self.name)

    def close(self) -> None:
        """Closes the connections."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class CheckpointAuxiliary(Auxiliary):
    """A model in this process, of the policy's tokenizer and image processing.

    Args:
        name: Of the model.
        checkpoint: A run directory or a checkpoint folder.
        dtype: Of its weights; None is the policy's.
        offload: Keep it in the CPU's memory between uses.
        max_batch_size: Rollouts that decode together.
    """

    has_logprobs = True

    def __init__(
        self,
        name: str,
        checkpoint: str,
        dtype: str | None = None,
        offload: bool = True,
        max_batch_size: int = 256,
    ) -> None:
        super().__init__(name)
        self._folder = checkpoint_folder(checkpoint, "models", "checkpoint")
        self._dtype, self._offload, self._max_batch_size = dtype, offload, max_batch_size
        self._policy: Policy | None = None
        self._engine: _LocalEngine | None = None

    def connect(self, policy: Policy) -> None:
        """Loads the model.

        Raises:
            ValueError: Its tokens or images are not the policy's.
        """
        dtype = self._dtype or str(policy.model.dtype).removeprefix("torch.")
        loaded = load_policy(self._folder, dtype=dtype)
        # Their limits of size mean nothing: the policy's views are what it is shown.
        mine, theirs = (
            replace(p.model.view_maker, min_pixels=0, max_pixels=0) for p in (policy, loaded)
        )
        if policy.tokenizer.get_vocab() != loaded.tokenizer.get_vocab() or mine != theirs:
            raise ValueError(
                f"Auxiliary {self.name} has another tokenizer or cuts images in another way than "
                "the policy. Serve it behind an endpoint (url and model): text is tokenised anew."
            )
        model = loaded.model.requires_grad_(False)
        self._policy = policy
        self._engine = _LocalEngine(
            model, max_batch_size=self._max_batch_size, vocabulary=policy.model.vocab_size
        )

    @contextmanager
    def at_work(self) -> Iterator[Engine]:
        """The engine, on the policy's device."""
        engine = _connected(self._engine, self.name)
        assert self._policy is not None
        engine.model.to(self._policy.model.device)
        try:
            yield engine
        finally:
            if self._offload:
                engine.model.to("cpu")

    def close(self) -> None:
        """Lets the model go."""
        self._engine = self._policy = None


class _LocalEngine(HFEngine):
    """Draws from the ids that the policy has; heads are padded to different sizes."""

    def __init__(self, *args: Any, vocabulary: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vocabulary = vocabulary

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        size = self.model.vocab_size
        banned = tuple(i for i in sampling.banned_ids if i < size)
        shaped = replace(sampling, banned_ids=(*banned, *range(self._vocabulary, size)))
        return await super().generate(session, context, shaped, seed)


def _connected(engine: Any, name: str) -> Any:
    if engine is None:
        raise RuntimeError(f"Auxiliary {name} is not connected: call connect() before.")
    return engine


def make_auxiliary(name: str, given: object, cache: Path | None = None) -> Auxiliary:
    """An auxiliary from its settings: ``url`` and ``model`` of an endpoint, or ``checkpoint``.

    Raises:
        ValueError: A setting is unknown, wrong or missing.
        FileNotFoundError: The checkpoint is not there.
    """
    if not isinstance(name, str) or not name:
        # Rollouts of no name are the policy's own.
        raise ValueError(f"auxiliaries: the name {name!r} is no text: call the model by a word.")
    place = f"auxiliaries.{name}"
    if not isinstance(given, Mapping) or ("url" in given) == ("checkpoint" in given):
        raise ValueError(f"{place}: give url and model of an endpoint, or checkpoint, a folder.")
    if "url" in given:
        return EndpointAuxiliary(name, EndpointSettings.of(given, place), cache)
    if given.keys() - _LOCAL:
        raise ValueError(f"{place}: beside checkpoint there are {', '.join(sorted(_LOCAL))}.")
    if not isinstance(given["checkpoint"], str | Path):
        raise ValueError(f"{place}.checkpoint is {given['checkpoint']!r}: give a folder.")
    size = given.get("max_batch_size", 1)
    if type(size) is not int or size < 1:
        raise ValueError(f"{place}.max_batch_size is {size!r}: give a whole number of at least 1.")
    return CheckpointAuxiliary(name, **{str(key): value for key, value in given.items()})


def add_rollouts(
    auxiliary: Auxiliary,
    count: int,
    collector: Collector,
    plan: Plan,
    groups: Sequence[RolloutGroup],
) -> None:
    """Lets an auxiliary play the groups' samples, and adds its rollouts to them.

    Args:
        auxiliary: Connected.
        count: Rollouts of a group.
        collector: The policy's: the same environment, prompts and seeds.
        plan: The policy's of this step; the gate is for the policy alone.
        groups: Changed in place.
    """
    theirs = replace(plan, num_rollouts=count, author=auxiliary.name, gate=None)
    with auxiliary.at_work() as engine:
        added = replace(collector, engine=engine).collect([g.sample for g in groups], theirs)
    for group, more in zip(groups, added, strict=True):
        group.rollouts += more.rollouts
    rollouts = [rollout for group in added for rollout in group.rollouts]
    failed = [r for r in rollouts if r.termination is Termination.ERROR]
    if failed:
        logger.warning(
            "Step %d: %d of %d rollouts of %s failed, and their groups are smaller by them (%s).",
            plan.step,
            len(failed),
            len(rollouts),
            auxiliary.name,
            failed[0].error,
        )
