"""One rollout as a state machine: turns of the policy, observations of the environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from reframe_vl.data.media import MediaError
from reframe_vl.policy.views import ViewError, ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Engine, EngineError, Generation
from reframe_vl.rollout.gate import BELOW_THRESHOLD, GateWatch, Item
from reframe_vl.rollout.prompt import Prompt, native_video
from reframe_vl.tools.base import (
    ProposedCall,
    Reason,
    Refusal,
    StatefulTool,
    Tool,
    ToolRequest,
    ToolResult,
    ToolUnavailableError,
    propose,
    sessions,
)
from reframe_vl.tools.codec import Codec
from reframe_vl.types import (
    CallRecord,
    CallStatus,
    Context,
    Markup,
    Media,
    Part,
    Provenance,
    Quoted,
    Rollout,
    RolloutKey,
    Sample,
    Sampling,
    Span,
    Termination,
    VideoMedia,
)

REPEATED_NOTE = "You made this call before; this is the same result."

ToolRunner = Callable[[Tool, ToolRequest, Media], ToolResult]


@dataclass(frozen=True)
class Budget:
    """Where an episode ends.

    Attributes:
        max_turns: Turns of the policy.
        max_context_tokens: Of one context after expansion, the next turn's limit included.
        max_visual_tokens: Of one context.
        max_refusals: Refused calls in a row; a tool's own failures do not count.
        max_tool_text_tokens: A tool's words are cut after so many tokens.
        tool_view_pixels: Budget of each image that a tool returns; None is the model's limit.
    """

    max_turns: int = 4
    max_context_tokens: int = 4096
    max_visual_tokens: int = 4096
    max_refusals: int = 3
    max_tool_text_tokens: int = 256
    tool_view_pixels: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and value < 1:
                raise ValueError(f"limits.{entry.name} is {value}: it must be at least 1.")


@dataclass(frozen=True)
class Environment:
    """Everything an episode needs that is the same for all of them.

    Attributes:
        run_tool: Executes a checked call; replaced where only the pixels returned shall differ.
        tools_on: Where false a call is refused whatever it asks for.
        tools_in_threads: Calls run, and what they return is resized, in threads: no other episode
            waits for them.
    """

    codec: Codec
    encoder: Encoder
    view_maker: ViewMaker
    tools: Sequence[Tool]
    budget: Budget
    run_tool: ToolRunner
    tools_on: bool = True
    tools_in_threads: bool = False


@dataclass
class Episode:
    """One episode on one sample, from its prompt to its termination.

    Attributes:
        drop: d_i of docs/method.md, 1.1: whether the original visual input leaves the context
            after the first successful call.
        forced: Arguments of calls that the environment writes before the policy's first turn,
            with the tool that takes them.
        gate: Rewrites calls that miss the evidence; None lets all of them stand.
    """

    key: RolloutKey
    sample: Sample
    prompt: Prompt
    environment: Environment
    sampling: Sampling
    drop: bool = False
    forced: Sequence[tuple[Tool, dict[str, Any]]] = ()
    gate: GateWatch | None = None
    policy_version: int = 0
    _contexts: list[Context] = field(init=False)
    _calls: list[CallRecord] = field(default_factory=list, init=False)
    _results: dict[Hashable, ToolResult] = field(default_factory=dict, init=False)
    _answers: list[str] = field(default_factory=list, init=False)
    _turns: int = field(default=0, init=False)
    _branches: list[Context] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._contexts = [Context([self.prompt.full])]

    async def run(self, engine: Engine, session: str) -> Rollout:
        """Plays the episode; a failure of engine or sandbox ends it unscored, with its message."""
        error = ""
        with sessions(self.environment.tools, self.sample.media) as tools:
            if tools is not self.environment.tools:
                self.environment = replace(self.environment, tools=tools)
            try:
                termination = await self._force_calls() or await self._play(engine, session)
            except (EngineError, ToolUnavailableError) as failure:
                termination, error = Termination.ERROR, str(failure)
        return Rollout(
            key=self.key,
            contexts=self._contexts,
            sampling=self.sampling,
            termination=termination,
            drop_assigned=self.drop,
            calls=self._calls,
            answers=self._answers,
            num_turns=self._turns,
            policy_version=self.policy_version,
            error=error,
            branches=self._branches,
        )

    # ------------------------------------------------------------------ turns

    async def _play(self, engine: Engine, session: str) -> Termination:
        budget = self.environment.budget
        if full := self._exceeded(self._contexts[-1]):
            return full
        while True:
            context = self._contexts[-1]
            seed = (self.key.entropy + self._turns) % 2**128
            turn = await engine.generate(session, context, self.sampling, seed)
            author = Provenance.EXTERNAL if self.key.author else Provenance.SAMPLED
            context.spans.append(Span(author, turn.token_ids, logprobs=turn.logprobs))
            self._turns += 1
            truncated = turn.finish == "length"
            text = self.environment.encoder.decode(turn.token_ids)
            parsed = self.environment.codec.parse(text, truncated)
            self._answers = list(parsed.answers)
            outcome = parsed.call or parsed.refusal
            if outcome is None:
                return self._without_call(truncated)
            if self._turns == budget.max_turns:
                return Termination.MAX_TURNS
            checked = outcome if isinstance(outcome, Refusal) else self._check(outcome)
            if self.gate and (item := self.gate.intervene(checked)):
                start = parsed.call_start or 0
                before = self.environment.encoder.tokens_before(turn.token_ids, start)
                if self.gate.gate.repair:
                    ended = await self._repair(item, outcome, checked, turn, before, text[start:])
                else:
                    self._branch(item, turn, before)
                    ended = await self._answer_call(outcome, checked, truncated)
            else:
                ended = await self._answer_call(outcome, checked, truncated)
            if ended is not None:
                return ended

    def _without_call(self, truncated: bool) -> Termination:
        if self._answers:
            return Termination.ANSWERED
        return Termination.TRUNCATED if truncated else Termination.NO_ANSWER

    async def _answer_call(
        self,
        outcome: ProposedCall | Refusal,
        checked: tuple[Tool, ToolRequest] | Refusal,
        truncated: bool,
    ) -> Termination | None:
        """Executes or refuses a call and appends what the policy sees of it."""
        name, arguments = _as_written(outcome)
        if isinstance(checked, Refusal):
            self._record(name, arguments, CallStatus.REFUSED, reason=checked.reason)
            streak = 0
            for call in reversed(self._calls):
                if call.status is not CallStatus.REFUSED:
                    break
                streak += 1
            if streak >= self.environment.budget.max_refusals:
                return Termination.REFUSAL_STREAK
            return self._observe([self._words(checked.message)], truncated)
        tool, request = checked
        return await self._execute(tool, request, arguments, truncated)

    def _check(self, call: ProposedCall) -> tuple[Tool, ToolRequest] | Refusal:
        if not self.environment.tools_on:
            return Refusal(
                Reason.UNKNOWN_TOOL, "No tools can be called now. Answer from what you have seen."
            )
        return propose(call, self.environment.tools, self.prompt.scene)

    # ------------------------------------------------------------------ gate

    async def _repair(
        self,
        item: Item,
        outcome: ProposedCall | Refusal,
        checked: tuple[Tool, ToolRequest] | Refusal,
        turn: Generation,
        before: int,
        proposal: str,
    ) -> Termination | None:
        """Writes the canonical call in place of the proposed one, and executes it.

        Args:
            item: What the canonical call asks for.
            outcome: The call as proposed.
            checked: What became of it.
            turn: In which it was proposed, the last of the context.
            before: Tokens of the turn before the call: they stay.
            proposal: The call's text.
        """
        spans = self._contexts[-1].spans
        spans.pop()
        if before:
            kept, logprobs = turn.token_ids[:before], turn.logprobs[:before]
            spans.append(Span(Provenance.SAMPLED, kept, logprobs=logprobs))
        # The turn ends in a call now: what it answered is no answer.
        self._answers = []
        name, arguments = _as_written(outcome)
        reason = checked.reason if isinstance(checked, Refusal) else BELOW_THRESHOLD
        self._record(name, arguments, CallStatus.REPLACED, reason=reason, proposal=proposal)
        return await self._inject(item.tool, item.arguments, item)

    def _branch(self, item: Item, turn: Generation, before: int) -> None:
        """Keeps the canonical call beside the rollout, which goes on with its own."""
        spans = [replace(span, carried=True) for span in self._contexts[-1].spans[:-1]]
        if before:
            kept, logprobs = turn.token_ids[:before], turn.logprobs[:before]
            spans.append(Span(Provenance.SAMPLED, kept, logprobs=logprobs, carried=True))
        branch = Context([*spans, self._canonical_span(item.tool, item.arguments)])
        # Nothing is sampled behind it, so it may be as long as any context.
        if len(branch) <= self.environment.budget.max_context_tokens:
            self._branches.append(branch)

    def _canonical_span(self, tool: Tool, arguments: dict[str, Any]) -> Span:
        text = self.environment.codec.render_call(tool.name, arguments)
        return self.environment.encoder.span([Markup(text)], Provenance.INJECTED)

    async def _inject(
        self, tool: Tool, arguments: dict[str, Any], item: Item | None = None
    ) -> Termination | None:
        """Writes a call of the environment's and executes it."""
        call = self._canonical_span(tool, arguments)
        if full := self._exceeded(self._contexts[-1], call):
            return full
        self._contexts[-1].spans.append(call)
        request = tool.check(arguments, self.prompt.scene)
        if isinstance(request, Refusal):
            raise ValueError(
                f"The canonical call {arguments} of sample {self.sample.id} is refused "
                f"({request.reason}): rebuild its record's evidence."
            )
        return await self._execute(
            tool, request, arguments, truncated=False, by_gate=True, item=item
        )

    # ------------------------------------------------------------------ calls

    async def _force_calls(self) -> Termination | None:
        """Writes the calls that every model is made to make, and shows what they return."""
        for tool, arguments in self.forced:
            ended = await self._inject(tool, arguments)
            if ended is not None:
                return ended
        return None

    async def _execute(
        self,
        tool: Tool,
        request: ToolRequest,
        arguments: dict[str, Any],
        truncated: bool,
        by_gate: bool = False,
        item: Item | None = None,
    ) -> Termination | None:
        if self.gate and item:
            self.gate.settle(item)
        known = self._results.get(request.identity)
        try:
            result = known or await self._run(tool, request)
            if self.environment.tools_in_threads:
                parts = await asyncio.to_thread(self._show, result)
            else:
                parts = self._show(result)
        except (MediaError, ViewError, OSError) as failure:
            self._record(
                tool.name, arguments, CallStatus.FAILED, reason=Reason.TOOL_FAILED, by_gate=by_gate
            )
            return self._observe([self._words(f"The tool failed: {failure}")], truncated)
        if known:
            parts = [self._words(REPEATED_NOTE), *parts]
        if not result.failed:
            self._results[request.identity] = result
        if self.gate:
            self.gate.executed(request)
        self._record(
            tool.name,
            arguments,
            CallStatus.REPEATED if known else CallStatus.OK,
            result=result,
            reason=Reason.CODE_RAISED if result.failed else "",
            coercions=request.coercions,
            by_gate=by_gate,
        )
        first_success = not (known or result.failed) and len(self._results) == 1
        return self._observe(parts, truncated, drop=self.drop and first_success)

    async def _run(self, tool: Tool, request: ToolRequest) -> ToolResult:
        run_tool, media = self.environment.run_tool, self.sample.media
        if isinstance(tool, StatefulTool) or self.environment.tools_in_threads:
            # The other episodes of the loop go on, however long it takes.
            return await asyncio.to_thread(run_tool, tool, request, media)
        return run_tool(tool, request, media)

    def _show(self, result: ToolResult) -> list[Part]:
        budget = self.environment.budget.tool_view_pixels
        media = self.sample.media
        if result.frames and self.prompt.native_video and isinstance(media, VideoMedia):
            times = [media.timestamps_s[frame] for frame in result.frames]
            pixels = [image.pixels for image in result.images]
            maker = self.environment.view_maker
            return native_video(
                self.environment.codec,
                maker,
                times,
                lambda part: maker.video(
                    pixels[part.start : part.stop], times[part.start : part.stop], budget
                ),
            )
        parts: list[Part] = []
        if result.text:
            # A traceback says at its end what is wrong.
            parts.append(self._words(result.text, keep_end=result.failed))
        for image in result.images:
            if image.caption:
                parts.append(self._words(image.caption))
            parts.append(self.environment.view_maker.view(image.pixels, budget))
        return parts

    def _record(
        self,
        name: str,
        arguments: dict[str, Any],
        status: CallStatus,
        *,
        result: ToolResult | None = None,
        reason: str = "",
        coercions: int = 0,
        by_gate: bool = False,
        proposal: str = "",
    ) -> None:
        self._calls.append(
            CallRecord(
                turn=max(self._turns - 1, 0),
                name=name,
                arguments=arguments,
                status=status,
                boxes=result.boxes if result else (),
                frames=result.frames if result else (),
                reason=str(reason),
                coercions=coercions,
                by_gate=by_gate,
                proposal=proposal,
            )
        )

    # ------------------------------------------------------------------ observations

    def _words(self, text: str, keep_end: bool = False) -> Quoted:
        limit = self.environment.budget.max_tool_text_tokens
        return Quoted(self.environment.encoder.cut(text, limit, keep_end))

    def _observe(
        self, parts: Sequence[Part], truncated: bool, drop: bool = False
    ) -> Termination | None:
        """Appends an observation whole, or ends the episode where it does not fit."""
        environment = self.environment
        span = environment.encoder.span(
            environment.codec.observation(parts, close_turn=truncated), Provenance.OBSERVED
        )
        context = self._without_original() if drop else self._contexts[-1]
        if full := self._exceeded(context, span):
            return full
        if drop:
            self._contexts.append(context)
        context.spans.append(span)
        return None

    def _exceeded(self, context: Context, *more: Span) -> Termination | None:
        """Which budget a context would exceed, with room for the policy's next turn."""
        budget = self.environment.budget
        tokens = len(context) + sum(map(len, more)) + self.sampling.max_new_tokens
        if tokens > budget.max_context_tokens:
            return Termination.MAX_TOKENS
        visual = context.num_visual_tokens + sum(span.num_visual_tokens for span in more)
        return Termination.MAX_VISUAL_TOKENS if visual > budget.max_visual_tokens else None

    def _without_original(self) -> Context:
        """The context so far, less the original visual input; its turns are not trained again."""
        shown = [replace(s, carried=True) for s in self._contexts[-1].spans[1:]]
        return Context([self.prompt.text_only, *shown])


def _as_written(outcome: ProposedCall | Refusal) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call, as far as they could be read."""
    if isinstance(outcome, Refusal):
        return "", {}
    return outcome.name, outcome.arguments if isinstance(outcome.arguments, dict) else {}
