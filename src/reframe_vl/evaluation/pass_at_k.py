"""pass@k (docs/method.md, 1.6): several sampled answers an item, and what k of them would do."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reframe_vl.evaluation.intervals import hierarchical_interval
from reframe_vl.evaluation.metrics import pass_at_k
from reframe_vl.evaluation.outcomes import LeftOut, judge
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.settings import RolloutSettings, make_environment
from reframe_vl.tools.base import Tool
from reframe_vl.types import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampledAnswers:
    """How many of an item's sampled answers are right.

    Attributes:
        right: By item.
        samples: Of each item.
        media: The key of each item's media.
        left_out: Items without outcome by reason: a rollout of theirs could not be scored.
    """

    right: Mapping[str, int]
    samples: int
    media: Mapping[str, str]
    left_out: Mapping[str, int]


def sample_answers(
    policy: Policy,
    settings: RolloutSettings,
    tools: Sequence[Tool],
    samples: Sequence[Sample],
    count: int,
) -> SampledAnswers:
    """Plays each sample ``count`` times, with tools, at the temperature of training.

    Every answer has a random seed of its own, which depends on the item and its number alone.
    """
    loop, engine = EventLoopThread(), HFEngine(policy.model, max_batch_size=settings.max_concurrent)
    collector = Collector(
        engine,
        make_environment(policy, tools, settings.budget),
        settings.prompt,
        loop,
        max_concurrent=settings.max_concurrent,
    )
    plan = Plan(step=0, num_rollouts=count, sampling=settings.sampling(policy))
    right: dict[str, int] = {}
    left_out: Counter[str] = Counter()
    # One wave at a time: all rollouts of a test set would hold all its pixels.
    at_once = max(settings.max_concurrent // count, 1)
    try:
        for start in range(0, len(samples), at_once):
            for group in collector.collect(samples[start : start + at_once], plan):
                outcomes = [judge(rollout, group.sample) for rollout in group.rollouts]
                lost = next((o for o in outcomes if isinstance(o, LeftOut)), None)
                if lost is not None:
                    left_out[str(lost)] += 1
                    continue
                right[group.sample.id] = sum(
                    o.correct for o in outcomes if not isinstance(o, LeftOut)
                )
    finally:
        collector.ahead.close()
        engine.close()
        loop.stop()
    if left_out:
        logger.warning("pass@k: items left out: %s.", dict(left_out))
    media = {sample.id: sample.media.key for sample in samples if sample.id in right}
    return SampledAnswers(right, count, media, dict(left_out))


def pass_curve(answers: SampledAnswers) -> dict[str, dict[str, float]]:
    """Each k from 1 by doubling, up to the number of samples: the value and its interval.

    Empty where no item could be scored.
    """
    names = list(answers.right)
    right_N = torch.tensor([answers.right[name] for name in names])
    samples_N = torch.full_like(right_N, answers.samples)
    media = [answers.media[name] for name in names]
    curve: dict[str, dict[str, float]] = {}
    k = 1
    while names and k <= answers.samples:
        terms_N = pass_at_k(right_N, samples_N, k).double().numpy()
        curve[str(k)] = hierarchical_interval(np.asarray(terms_N), media).to_dict()
        k *= 2
    return curve
