"""Collects groups of rollouts: episodes as coroutines, a prompt once for its whole group."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from reframe_vl.data.media import MediaError
from reframe_vl.policy.views import ViewError
from reframe_vl.rollout.drop import DropMode, draw_drops
from reframe_vl.rollout.engine import Engine
from reframe_vl.rollout.episode import Environment, Episode, ToolRunner
from reframe_vl.rollout.gate import Gate, GateWatch, evidence_items
from reframe_vl.rollout.prompt import Prompt, PromptSettings, build_prompt
from reframe_vl.rollout.prompts_ahead import PromptsAhead
from reframe_vl.tools.base import Tool
from reframe_vl.types import (
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sample,
    Sampling,
    Termination,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EventLoopThread:
    """One event loop in one thread, for the life of a run."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        # Calls of tools mostly wait, for other processes or for media.
        self._loop.set_default_executor(ThreadPoolExecutor(64, thread_name_prefix="tools"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], timeout=1.0).done:
                if self._loop.is_closed():
                    raise RuntimeError("The loop ended before it came to this coroutine.")
            return future.result()
        finally:
            future.cancel()

    def cancel(self) -> None:
        """Cancels what still runs; whoever waits for it is told."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True)
class Plan:
    """What is asked of a wave of episodes.

    Attributes:
        step: Part of every rollout's key, so of its seed.
        num_rollouts: G.
        drop_probability: P(d_i = 1).
        forced: The calls that the environment writes into each episode of a sample.
        run_tool: Replaces how checked calls of a sample are executed.
        gate: Rewrites calls that miss the evidence.
        author: The auxiliary model that the engine speaks for; empty for the policy.
        earlier: How often each sample came earlier in the step, on other ranks too; None counts
            those of this call.
    """

    step: int
    num_rollouts: int
    sampling: Sampling
    drop_probability: float = 0.0
    drop_mode: DropMode = "bernoulli"
    policy_version: int = 0
    forced: Callable[[Sample, Prompt], Sequence[tuple[Tool, dict[str, Any]]]] | None = None
    run_tool: Callable[[Sample], ToolRunner] | None = None
    gate: Gate | None = None
    author: str = ""
    earlier: Sequence[int] | None = None


@dataclass
class Collector:
    """Turns samples into rollout groups.

    Attributes:
        max_concurrent: Episodes that are under way at once.
        ahead: Where prompts of later samples can be begun.
        seed: Of the run; with step, sample and index it seeds every rollout.
        building: Held while a wave's prompts are built. Waves that are collected in several threads
            then begin one after the other, and not all at once when all are built.
    """

    engine: Engine
    environment: Environment
    prompts: PromptSettings
    loop: EventLoopThread = field(repr=False)
    seed: int = 0
    max_concurrent: int = 256
    building: threading.Lock = field(default_factory=threading.Lock, repr=False)
    ahead: PromptsAhead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ahead = PromptsAhead(self._prompt)

    def collect(self, samples: Sequence[Sample], plan: Plan) -> list[RolloutGroup]:
        """Plays ``plan.num_rollouts`` episodes on each sample.

        A sample whose media cannot be read gives rollouts that ended in ERROR: they are logged,
        kept in the record and left out of all statistics.
        """
        episodes: list[Episode] = []
        failed: dict[int, str] = {}
        seen: Counter[str] = Counter()
        firsts: list[int] = []
        with self.building:
            for number, sample in enumerate(samples):
                # A sample that comes twice in a step must not give the same rollouts twice.
                earlier = seen[sample.id] if plan.earlier is None else plan.earlier[number]
                firsts.append(earlier * plan.num_rollouts)
                seen[sample.id] += 1
                try:
                    episodes += self._episodes(sample, plan, firsts[number])
                except (MediaError, ViewError, OSError) as failure:
                    logger.warning(
                        "Sample %s is left out of step %d: %s", sample.id, plan.step, failure
                    )
                    failed[number] = str(failure)
        rollouts = iter(self.loop.run(self._play(episodes)))
        return [
            RolloutGroup(
                sample,
                [
                    self._failed(sample, plan, firsts[number] + i, failed[number])
                    for i in range(plan.num_rollouts)
                ]
                if number in failed
                else [next(rollouts) for _ in range(plan.num_rollouts)],
            )
            for number, sample in enumerate(samples)
        ]

    async def _play(self, episodes: Sequence[Episode]) -> list[Rollout]:
        sessions = [f"{i}/{episode.key.sample_id}" for i, episode in enumerate(episodes)]
        rollouts: dict[int, Rollout] = {}
        waiting = iter(range(len(episodes)))

        async def play(at: int | None) -> None:
            while at is not None:
                try:
                    rollouts[at] = await episodes[at].run(self.engine, sessions[at])
                finally:
                    following = next(waiting, None) if at in rollouts else None
                    if following is not None:
                        # Before the release: an engine of waves takes it into the next one.
                        self.engine.open([sessions[following]])
                    self.engine.release(sessions[at])
                at = following

        first = list(islice(waiting, self.max_concurrent))
        self.engine.open([sessions[at] for at in first])
        async with asyncio.TaskGroup() as group:
            for at in first:
                group.create_task(play(at))
        return [rollouts[at] for at in range(len(episodes))]

    def _episodes(self, sample: Sample, plan: Plan, first: int) -> list[Episode]:
        env = self.environment
        if plan.run_tool is not None:
            env = replace(env, run_tool=plan.run_tool(sample))
        prompt = self.ahead.take(sample)
        drops = draw_drops(
            plan.num_rollouts,
            plan.drop_probability,
            plan.drop_mode,
            np.random.default_rng(self._group_seed(sample, plan.step, first)),
        )
        forced = plan.forced(sample, prompt) if plan.forced else ()
        items = evidence_items(sample, prompt, env.tools) if plan.gate else []
        keys = [self._key(sample, plan, first + index) for index in range(plan.num_rollouts)]
        return [
            Episode(
                key,
                sample,
                prompt,
                env,
                plan.sampling,
                drop=drop,
                forced=forced,
                gate=GateWatch(plan.gate, items, key.entropy) if plan.gate else None,
                policy_version=plan.policy_version,
            )
            for key, drop in zip(keys, drops, strict=True)
        ]

    def _prompt(self, sample: Sample) -> Prompt:
        env = self.environment
        return build_prompt(sample, env.codec, env.encoder, env.view_maker, env.tools, self.prompts)

    def _key(self, sample: Sample, plan: Plan, index: int) -> RolloutKey:
        return RolloutKey(self.seed, plan.step, sample.id, index, plan.author)

    def _failed(self, sample: Sample, plan: Plan, index: int, error: str) -> Rollout:
        return Rollout(
            self._key(sample, plan, index),
            contexts=[],
            sampling=plan.sampling,
            termination=Termination.ERROR,
            policy_version=plan.policy_version,
            error=error,
        )

    def _group_seed(self, sample: Sample, step: int, first: int) -> int:
        text = f"drop/{self.seed}/{step}/{sample.id}/{first}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
