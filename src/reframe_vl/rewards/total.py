"""``R = R_ans + w_call f(p) R_call + lambda_obs R_obs - R_pen`` of docs/method.md, 1.1.

PyVision-RL's ``R = R_acc + 0.1 n_tc 1[R_acc = 1]`` (1.4) and Vision-EKIPL's
``R = R_acc + R_format`` (1.5) are the first term and one more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reframe_vl.rewards.answer import answer_reward
from reframe_vl.rewards.call import CallTable, call_reward
from reframe_vl.rewards.grounding import grounding_reward
from reframe_vl.rewards.tool_use import tool_use_reward
from reframe_vl.rewards.validity import ValidityWeights, form_reward, validity_penalty
from reframe_vl.schedules import call_decay
from reframe_vl.types import Rollout, Sample


@dataclass(frozen=True)
class RewardWeights:
    """What goes into the total; the numbers are our default. A weight of 0 switches a term off.

    Attributes:
        call: w_call, the weight of R_call at the start.
        kappa: How fast R_call decays; 0 is a straight line.
        grounding: lambda_obs.
        penalty: The weight of R_pen as a whole.
        tool_use: What each call behind a right answer is worth (PyVision-RL).
        form: What an output without any fault of form is worth (Vision-EKIPL).
        validity: The entries of R_pen.
        call_table: The values of R_call.
    """

    call: float = 0.5
    kappa: float = 3.0
    grounding: float = 0.5
    penalty: float = 1.0
    tool_use: float = 0.0
    validity: ValidityWeights = field(default_factory=ValidityWeights)
    call_table: CallTable = field(default_factory=CallTable)
    form: float = 0.0

    def __post_init__(self) -> None:
        for name in ("call", "kappa", "grounding", "penalty", "tool_use", "form"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"reward.{name} is {value}, but must be a finite number that is 0 or more: "
                    "less would turn the term's meaning round. A weight of 0 switches it off."
                )

    def factors(self, progress: float) -> dict[str, float]:
        """What each component is multiplied by in the total, at progress p in [0, 1]."""
        return {
            "answer": 1.0,
            "call": self.call * call_decay(progress, self.kappa),
            "grounding": self.grounding,
            "penalty": -self.penalty,
            "tool_use": self.tool_use,
            "form": self.form,
        }


def score(
    rollout: Rollout, sample: Sample, weights: RewardWeights, progress: float
) -> tuple[dict[str, float | None], float | None]:
    """The components, unweighted, and the total.

    A component is None where it does not apply or cannot be scored; call and grounding are then
    left out of the sum. Without an answer score there is no total: the rollout leaves all
    statistics.

    Args:
        rollout: Read only.
        sample: What it was about.
        weights: Of the terms.
        progress: p in [0, 1].

    Returns:
        ``{"answer", "call", "grounding", "penalty"}``, with ``"tool_use"`` and ``"form"`` where
        they have a weight, and R.
    """
    components = {
        "answer": answer_reward(rollout, sample),
        "call": call_reward(rollout, sample, weights.call_table),
        "grounding": grounding_reward(rollout, sample),
        "penalty": validity_penalty(rollout, weights.validity) if rollout.played else None,
    }
    if weights.tool_use:
        components["tool_use"] = tool_use_reward(rollout, components["answer"])
    if weights.form:
        components["form"] = form_reward(rollout) if rollout.played else None
    if components["answer"] is None:
        return components, None
    factors = weights.factors(progress)
    total = sum(factors[name] * value for name, value in components.items() if value is not None)
    return components, total
