"""The arms of docs/method.md, 1.6: one checkpoint, one set of items, greedy decoding."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reframe_vl.evaluation.controls import Content, ForcedCalls
from reframe_vl.evaluation.outcomes import (
    FORCED_ARMS,
    Arm,
    EvaluationResult,
    LeftOut,
    Outcome,
    gather,
    judge,
    named_arms,
)
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Engine, SyncedEngine
from reframe_vl.rollout.episode import Budget, Environment
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.prompt import PromptSettings, num_grids
from reframe_vl.tools.base import Tool, ToolRequest, ToolResult
from reframe_vl.tools.codec import Codec
from reframe_vl.tools.turns import CALL_OPEN
from reframe_vl.types import Media, Modality, Rollout, Sample, Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Protocol:
    """How an arm differs from plain answering.

    Attributes:
        tools_on: Whether the policy may call tools.
        show_tools: Whether the prompt has the tool section: also where calls are forced, since a
            conversation with calls has it.
        dropped: Whether the original view leaves after the first successful call.
        forced: What the forced calls return; None where none are forced.
    """

    tools_on: bool = False
    show_tools: bool = False
    dropped: bool = False
    forced: Content | None = None


def _forced(content: Content, dropped: bool) -> Protocol:
    return Protocol(show_tools=True, dropped=dropped, forced=content)


PROTOCOLS: Mapping[Arm, Protocol] = {
    Arm.TOOLS: Protocol(tools_on=True, show_tools=True),
    Arm.NO_TOOLS: Protocol(),
    Arm.NO_TOOLS_MATCHED: Protocol(),
    Arm.DROPPED: Protocol(tools_on=True, show_tools=True, dropped=True),
    Arm.CONFLICT: Protocol(tools_on=True, show_tools=True),
    Arm.TRUE: _forced(Content.TRUE, dropped=False),
    Arm.RANDOM: _forced(Content.RANDOM, dropped=False),
    Arm.BLANK: _forced(Content.BLANK, dropped=False),
    Arm.TRUE_DROPPED: _forced(Content.TRUE, dropped=True),
    Arm.RANDOM_DROPPED: _forced(Content.RANDOM, dropped=True),
    Arm.BLANK_DROPPED: _forced(Content.BLANK, dropped=True),
}


class Evaluator:
    """Plays the arms with one checkpoint. Call :meth:`close` when done.

    Args:
        model: The checkpoint.
        codec: Of the model's family.
        encoder: Of the model's tokenizer.
        tools: What the arms with tools offer.
        prompts: As in training: the same first view, o₀.
        budget: Where an episode ends.
        sampling: Banned ids, stop ids and length limit; its temperature is set to 0.
        engine: Generates with the checkpoint's weights; by default in this process.
        loop: Where a given engine lives; by default a thread of the evaluator's own.
        max_concurrent: Episodes that are under way at once.
        log_level: At which each arm is announced.
        judge: What a rollout comes to.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        codec: Codec,
        encoder: Encoder,
        tools: Sequence[Tool],
        prompts: PromptSettings,
        budget: Budget,
        sampling: Sampling,
        *,
        engine: Engine | None = None,
        loop: EventLoopThread | None = None,
        max_concurrent: int = 256,
        log_level: int = logging.INFO,
        judge: Callable[[Rollout, Sample], Outcome | LeftOut] = judge,
    ) -> None:
        self.prompts = prompts
        self.sampling = replace(sampling, temperature=0.0)
        self.max_concurrent = max_concurrent
        self.log_level = log_level
        self._judge = judge
        self.environment = Environment(
            codec,
            encoder,
            model.view_maker,
            tools,
            budget,
            run_tool=self._run_tool,
            # An engine that generates meanwhile must not wait for a tool.
            tools_in_threads=isinstance(engine, SyncedEngine),
        )
        self._engine = engine or HFEngine(model, max_batch_size=max_concurrent)
        self._owns_engine = engine is None
        self._loop = loop or EventLoopThread()
        self._owns_loop = loop is None
        self._building = threading.Lock()

    def close(self) -> None:
        """Ends what the evaluator started itself."""
        if self._owns_engine:
            self._engine.close()
        if self._owns_loop:
            self._loop.stop()

    def evaluate(
        self,
        samples: Sequence[Sample],
        conflict_samples: Sequence[Sample] | None = None,
        arms: Iterable[Arm] = tuple(Arm),
    ) -> EvaluationResult:
        """Plays samples in all arms; an item that an arm could not score leaves every arm.

        Args:
            samples: Played in every arm but ``conflict``.
            conflict_samples: For the ``conflict`` arm, which is skipped without them.
            arms: Which arms to play.

        Raises:
            ValueError: Two samples share an id, there are no arms, or ``no_tools_matched`` is asked
                for without ``tools``, whose visual tokens it is to match.
        """
        conflict_samples = conflict_samples or []
        by_id = _by_id([*samples, *conflict_samples])
        wanted = set(named_arms(list(arms))) - (set() if conflict_samples else {Arm.CONFLICT})
        forced = ForcedCalls(
            self.environment.tools,
            self._tool_pixels,
            {s.id: LeftOut.NO_EVIDENCE for s in samples if not s.evidence},
        )
        judged: dict[Arm, dict[str, Outcome | LeftOut]] = {}
        for arm in (arm for arm in Arm if arm in wanted):
            logger.log(self.log_level, "Evaluating the arm %s.", arm)
            if arm is Arm.NO_TOOLS_MATCHED:
                judged[arm] = self.play_matched(samples, judged[Arm.TOOLS])
            elif arm is Arm.CONFLICT:
                judged[arm] = self.play(arm, conflict_samples, forced)
            elif arm in FORCED_ARMS:
                usable = [s for s in samples if s.id not in forced.left_out]
                judged[arm] = self.play(arm, usable, forced)
            else:
                judged[arm] = self.play(arm, samples, forced)
        played_forced = bool(wanted & FORCED_ARMS)
        result = gather(judged, by_id, forced.left_out if played_forced else {})
        _log_left_out(result)
        return result

    # ------------------------------------------------------------------ one arm

    def play(
        self, arm: Arm, samples: Sequence[Sample], forced: ForcedCalls
    ) -> dict[str, Outcome | LeftOut]:
        """One arm, but for ``no_tools_matched``.

        Args:
            forced: Makes the calls of the forced arms; notes samples that have none.
        """
        protocol = PROTOCOLS[arm]
        plan = Plan(
            step=0,
            num_rollouts=1,
            sampling=self.sampling if protocol.tools_on else self._sampling_without_calls,
            drop_probability=float(protocol.dropped),
            forced=forced.calls if protocol.forced else None,
            run_tool=forced.runner(protocol.forced) if protocol.forced else None,
        )
        show_tools = self.prompts.show_tools and protocol.show_tools
        return self._collect(
            samples,
            plan,
            replace(self.environment, tools_on=protocol.tools_on),
            replace(self.prompts, show_tools=show_tools),
        )

    def play_matched(
        self,
        samples: Sequence[Sample],
        with_tools: Mapping[str, Outcome | LeftOut],
        only: Collection[str] | None = None,
    ) -> dict[str, Outcome | LeftOut]:
        """Without tools, on a first view with the visual tokens of the tools arm.

        Each modality is matched by itself. Samples of a modality of which the tools arm could
        score nothing are not played: they leave all arms anyway.

        Args:
            samples: Whose visual tokens are matched.
            with_tools: Their outcomes in the tools arm.
            only: Ids of the samples to play; all by default.
        """
        plan = Plan(step=0, num_rollouts=1, sampling=self._sampling_without_calls)
        # A video that the tools alone could see is shown here, in as many tokens as they took.
        prompts = replace(self.prompts, show_tools=False, on_demand_video=False)
        judged: dict[str, Outcome | LeftOut] = {}
        for modality in Modality:
            scored = [
                (sample, outcome)
                for sample in samples
                if sample.modality is modality
                and isinstance(outcome := with_tools[sample.id], Outcome)
            ]
            if not scored:
                continue
            grids = [
                num_grids(sample.media, self.environment.view_maker, prompts)
                for sample, _ in scored
            ]
            tokens = sum(outcome.visual_tokens for _, outcome in scored) / sum(grids)
            old = prompts.frame_pixels if modality is Modality.VIDEO else prompts.view_pixels
            view_maker, pixels = matched_views(self.environment.view_maker, old, tokens)
            # The enlarged view must not be what ends an episode.
            room = max(grids) * (pixels // view_maker.factor**2)
            limits = self.environment.budget
            budget = replace(
                limits,
                max_context_tokens=limits.max_context_tokens + room,
                max_visual_tokens=limits.max_visual_tokens + room,
            )
            judged |= self._collect(
                [sample for sample, _ in scored if only is None or sample.id in only],
                plan,
                replace(self.environment, tools_on=False, view_maker=view_maker, budget=budget),
                replace(prompts, view_pixels=pixels, frame_pixels=pixels),
            )
        return judged

    def _collect(
        self,
        samples: Sequence[Sample],
        plan: Plan,
        environment: Environment,
        prompts: PromptSettings,
    ) -> dict[str, Outcome | LeftOut]:
        collector = Collector(
            self._engine,
            environment,
            prompts,
            self._loop,
            max_concurrent=self.max_concurrent,
            building=self._building,
        )
        judged: dict[str, Outcome | LeftOut] = {}
        # One wave at a time: the rollouts of a whole test set would hold all its pixels.
        for start in range(0, len(samples), self.max_concurrent):
            for group in collector.collect(samples[start : start + self.max_concurrent], plan):
                (rollout,) = group.rollouts
                judged[group.sample.id] = self._judge(rollout, group.sample)
        return judged

    # ------------------------------------------------------------------ parts

    @property
    def _tool_pixels(self) -> int:
        budget = self.environment.budget
        return budget.tool_view_pixels or self.environment.view_maker.max_pixels

    def _run_tool(self, tool: Tool, request: ToolRequest, media: Media) -> ToolResult:
        return tool.run(request, media, self._tool_pixels)

    @property
    def _sampling_without_calls(self) -> Sampling:
        """A policy that always calls shall answer, not be refused until its turns are used up."""
        tokenizer = self.environment.encoder.tokenizer
        ids = tokenizer(CALL_OPEN, add_special_tokens=False)["input_ids"]
        # Where the tag is several tokens its first one starts other words too.
        banned = tuple(ids) if len(ids) == 1 else ()
        return replace(self.sampling, banned_ids=(*self.sampling.banned_ids, *banned))


def matched_views(
    view_maker: ViewMaker, max_pixels: int | None, tokens: float
) -> tuple[ViewMaker, int]:
    """A view maker whose images take at least about ``tokens`` visual tokens, and its budget.

    The budget is that of the smallest square with at least so many tokens: the control shall not
    have fewer. Smaller images are enlarged to it; none is shown at less than the budget of the
    plain arm.

    Args:
        view_maker: The model's own.
        max_pixels: Budget of the plain arm; None is the model's limit.
        tokens: To match, one image or temporal patch.
    """
    # Less a rounding error of the mean.
    side = max(math.ceil(math.sqrt(tokens) - 1e-6), 1) * view_maker.factor
    budget = max(side**2, max_pixels or view_maker.max_pixels)
    limit = max(budget, view_maker.max_pixels)
    return replace(view_maker, min_pixels=side**2, max_pixels=limit), budget


def _by_id(samples: Sequence[Sample]) -> dict[str, Sample]:
    by_id: dict[str, Sample] = {}
    for sample in samples:
        if sample.id in by_id:
            raise ValueError(
                f"Two samples have the id {sample.id}: arms are paired by id, so give each its own."
            )
        by_id[sample.id] = sample
    return by_id


def _log_left_out(result: EvaluationResult) -> None:
    for scope, reasons in result.left_out.items():
        if reasons:
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            logger.warning("Items left out (%s): %s.", scope, counts)
