"""What a config says about rollouts, and the environment it makes for a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.episode import Budget, Environment
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.tools.base import Tool, ToolRequest, ToolResult
from reframe_vl.types import Media, Sampling


@dataclass(frozen=True)
class RolloutSettings:
    """How rollouts are played, in training and in evaluation alike.

    Attributes:
        temperature: In training; evaluation is greedy.
        max_new_tokens: Of one turn.
        max_concurrent: Episodes under way at once.
    """

    prompt: PromptSettings = field(default_factory=PromptSettings)
    budget: Budget = field(default_factory=Budget)
    temperature: float = 1.0
    max_new_tokens: int = 64
    max_concurrent: int = 256

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1.")

    def sampling(self, policy: Policy) -> Sampling:
        """The training distribution of a policy's turns."""
        return policy.sampling(self.temperature, self.max_new_tokens)


def make_environment(policy: Policy, tools: Sequence[Tool], budget: Budget) -> Environment:
    """The environment of a policy's episodes."""

    def run_tool(tool: Tool, request: ToolRequest, media: Media) -> ToolResult:
        max_pixels = budget.tool_view_pixels or policy.model.view_maker.max_pixels
        return tool.run(request, media, max_pixels)

    return Environment(
        codec=policy.codec,
        encoder=Encoder(policy.tokenizer),
        view_maker=policy.model.view_maker,
        tools=tools,
        budget=budget,
        run_tool=run_tool,
    )
