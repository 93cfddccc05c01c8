"""Evaluates a loaded policy on the samples of an experiment."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from reframe_vl.evaluation.outcomes import EvaluationResult, named_arms
from reframe_vl.evaluation.protocols import Evaluator
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.tools.base import Tool
from reframe_vl.types import Sample


def evaluate_policy(
    policy: Policy,
    settings: RolloutSettings,
    tools: Sequence[Tool],
    samples: Sequence[Sample],
    conflict_samples: Sequence[Sample] | None = None,
    arms: Sequence[str | bool] | None = None,
    log_level: int = logging.INFO,
) -> EvaluationResult:
    """Plays samples as in training, but greedily, in all arms or in those named.

    Raises:
        ValueError: A name is no arm's.
    """
    wanted = named_arms(arms)
    evaluator = Evaluator(
        policy.model,
        policy.codec,
        Encoder(policy.tokenizer),
        tools,
        settings.prompt,
        settings.budget,
        settings.sampling(policy),
        max_concurrent=settings.max_concurrent,
        log_level=log_level,
    )
    try:
        return evaluator.evaluate(samples, conflict_samples, wanted)
    finally:
        evaluator.close()
