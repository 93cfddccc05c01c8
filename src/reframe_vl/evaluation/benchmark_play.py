"""Plays the items of a benchmark under several conditions, wave by wave, into a file of answers.

Whatever was answered before is not played again. Waves are always the same items in the same order,
and a wave of which an answer is missing is played as a whole: with the in-process engine an
evaluation that was killed and goes on gives the same answers as one that was not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from reframe_vl.evaluation.answers import Answered, AnswerFile, answered
from reframe_vl.evaluation.benchmarks.base import Item
from reframe_vl.evaluation.controls import ForcedCalls
from reframe_vl.evaluation.outcomes import FORCED_ARMS, Arm, LeftOut, Outcome
from reframe_vl.evaluation.protocols import Evaluator
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Engine, SyncedEngine
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings, make_environment
from reframe_vl.tools.base import Tool
from reframe_vl.types import Rollout, Sample

logger = logging.getLogger(__name__)

_PARTS = 8
"""Waves that ``max_concurrent`` is divided into."""

SAMPLED = "sampled"
"""The condition of sampled answers: with tools, at the temperature of training."""


@dataclass(frozen=True)
class Condition:
    """How items are played, greedily.

    Attributes:
        visual_tokens: Most visual tokens of the first view; None is the settings' own.
    """

    arm: Arm
    visual_tokens: int | None = None

    @property
    def name(self) -> str:
        """As it stands in answers and results."""
        at = "" if self.visual_tokens is None else f"@{self.visual_tokens}"
        return f"{self.arm.value}{at}"


class Player:
    """Plays items with one policy and one engine. Call :meth:`close` when done.

    Args:
        policy: Whose answers are wanted.
        settings: How rollouts are played.
        tools: What the policy can call.
        make_engine: Makes the engine from the policy's model.
        seed: Of sampled answers.
        max_frames: Most frames of a video's first view, for budgets of visual tokens.
    """

    def __init__(
        self,
        policy: Policy,
        settings: RolloutSettings,
        tools: Sequence[Tool],
        make_engine: Callable[..., Engine],
        *,
        seed: int = 0,
        max_frames: int = 64,
    ) -> None:
        """Starts the engine."""
        self.policy, self.settings, self.tools = policy, settings, list(tools)
        self.seed, self.max_frames = seed, max_frames
        self._loop = EventLoopThread()
        self._engine = make_engine(policy.model)
        self._synced = isinstance(self._engine, SyncedEngine)
        if isinstance(self._engine, SyncedEngine):
            self._loop.run(self._engine.start(policy.model.device))
            self._loop.run(self._engine.sync(policy.model, 0))

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()
        self._loop.stop()

    def play(self, items: Sequence[Item], condition: Condition, file: AnswerFile) -> None:
        """Plays what is missing in one condition.

        The condition ``no_tools_matched`` needs that of ``tools`` at the same budget before it.
        """
        name, arm = condition.name, condition.arm
        forced = ForcedCalls(self.tools, self._tool_pixels)
        found: dict[str, Answered] = {}

        def keep(rollout: Rollout, sample: Sample) -> Outcome | LeftOut:
            found[sample.id] = line = answered(rollout, sample, name)
            return _outcome(line)

        evaluator = Evaluator(
            self.policy.model,
            self.policy.codec,
            Encoder(self.policy.tokenizer),
            self.tools,
            self._prompts(condition.visual_tokens),
            self.settings.budget,
            self.settings.sampling(self.policy),
            engine=self._engine,
            loop=self._loop,
            max_concurrent=self.settings.max_concurrent,
            log_level=logging.DEBUG,
            judge=keep,
        )
        everything = [item.sample for item in items]
        with_tools = {}
        if arm is Arm.NO_TOOLS_MATCHED:
            tools = file.of(replace(condition, arm=Arm.TOOLS).name)
            with_tools = {sample.id: _outcome(tools[sample.id]) for sample in everything}

        def wave(samples: Sequence[Sample]) -> list[Answered]:
            if arm is Arm.NO_TOOLS_MATCHED:
                evaluator.play_matched(everything, with_tools, {s.id for s in samples})
            elif arm in FORCED_ARMS:
                usable = [s for s in samples if s.evidence]
                evaluator.play(arm, usable, forced)
                for sample in samples:
                    why = None if sample.evidence else LeftOut.NO_EVIDENCE
                    why = forced.left_out.get(sample.id, why)
                    if why is not None:
                        found[sample.id] = Answered(sample.id, name, left_out=why.value)
            else:
                evaluator.play(arm, samples, forced)
            # A modality without any answer with tools is not played at all.
            lost = Answered("", name, left_out=LeftOut.FAILED.value)
            return [found.pop(s.id, replace(lost, item=s.id)) for s in samples]

        self._waves(everything, name, 1, wave, file)

    def sample(self, items: Sequence[Item], count: int, file: AnswerFile) -> None:
        """Samples ``count`` answers to each item, with tools, at the temperature of training."""
        environment = make_environment(self.policy, self.tools, self.settings.budget)
        collector = Collector(
            self._engine,
            replace(environment, tools_in_threads=self._synced),
            self.settings.prompt,
            self._loop,
            seed=self.seed,
            max_concurrent=self.settings.max_concurrent,
        )
        plan = Plan(step=0, num_rollouts=count, sampling=self.settings.sampling(self.policy))

        def wave(samples: Sequence[Sample]) -> list[Answered]:
            return [
                answered(rollout, group.sample, SAMPLED, number)
                for group in collector.collect(samples, plan)
                for number, rollout in enumerate(group.rollouts)
            ]

        try:
            self._waves([item.sample for item in items], SAMPLED, count, wave, file)
        finally:
            collector.ahead.close()

    def _waves(
        self,
        samples: Sequence[Sample],
        condition: str,
        count: int,
        play: Callable[[Sequence[Sample]], list[Answered]],
        file: AnswerFile,
    ) -> None:
        # An engine that answers each request by itself need not wait for a wave's last. Its waves
        # are small, so that it has something to do when the first few prompts are built, and more
        # than it takes at once are under way, so that it never waits for the next.
        parts = _PARTS if self._synced else 1
        size = max(self.settings.max_concurrent // count // parts, 1)
        waves = [samples[start : start + size] for start in range(0, len(samples), size)]
        missing = [
            wave
            for wave in waves
            if any((condition, number, s.id) not in file for s in wave for number in range(count))
        ]
        logger.info("%s: %d of %d waves to play.", condition, len(missing), len(waves))
        with ThreadPoolExecutor(2 * parts if self._synced else 1) as threads:
            for number, answers in enumerate(threads.map(play, missing), 1):
                file.add(answers)
                logger.info("%s: wave %d of %d.", condition, number, len(missing))

    def _prompts(self, visual_tokens: int | None) -> PromptSettings:
        prompts = self.settings.prompt
        if visual_tokens is None:
            return prompts
        pixels = self.policy.model.view_maker.factor**2
        return replace(
            prompts,
            view_pixels=visual_tokens * pixels,
            frame_pixels=max(visual_tokens // self.max_frames, 1) * pixels,
        )

    @property
    def _tool_pixels(self) -> int:
        view_maker = self.policy.model.view_maker
        return self.settings.budget.tool_view_pixels or view_maker.max_pixels


def _outcome(line: Answered) -> Outcome | LeftOut:
    """What the arms need to know; whether the answer is right is the benchmark's to say."""
    if line.left_out is not None:
        return LeftOut(line.left_out)
    return Outcome(False, line.calls, line.visual_tokens, line.iou)
