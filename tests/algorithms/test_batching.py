"""Bins are balanced by what scoring runs through."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from grey_world import GreyImage
from reframe_vl.algorithms.batching import (
    BatchPlan,
    keep_teacher_logprobs,
    micro_batches,
    scored_tokens,
)
from reframe_vl.types import (
    Answer,
    Context,
    Modality,
    Provenance,
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sample,
    Span,
    Termination,
)
from tiny import random_context, sampling, view_maker


def rollouts(prompt, tails):
    return [
        Rollout(
            RolloutKey(0, 0, "s", i),
            [Context([prompt, Span(Provenance.SAMPLED, (7,) * n, logprobs=(0.0,) * n)])],
            sampling(),
            Termination.ANSWERED,
            advantage=1.0,
        )
        for i, n in enumerate(tails)
    ]


@given(st.integers(0, 2**31), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_a_shared_beginning_counts_once(seed, members):
    context = random_context(np.random.default_rng(seed), view_maker(), turns=3)
    ends = [Span(Provenance.SAMPLED, (9, i)) for i in range(members)]
    contexts = [Context([*context.spans, end]) for end in ends]
    assert scored_tokens(contexts) == len(context) + 2 * members
    assert scored_tokens([*contexts, *contexts]) == scored_tokens(contexts)


def test_bins_hold_like_numbers_of_scored_tokens():
    # Counted a row each the first group would weigh most; it is the lightest.
    many = rollouts(Span(Provenance.PROMPT, (5,) * 100), [1] * 8)  # Eight times the same.
    few = [rollouts(Span(Provenance.PROMPT, (6 + i,) * 120), [60]) for i in range(3)]
    sample = Sample("s", Modality.IMAGE, GreyImage("s", 1, 2), "What?", Answer("mcq", "A"))
    groups = [RolloutGroup(sample, members) for members in (many, *few)]
    batches = micro_batches(groups, sampling(), BatchPlan(1, 2), 0)
    loads = [scored_tokens([item.context for item in batch.items]) for batch in batches]
    assert sorted(loads) == [281, 360]


def test_a_teachers_log_probs_are_kept_with_the_tokens_they_judge():
    context = random_context(np.random.default_rng(0), view_maker(), turns=2)
    before = list(context.spans)
    values_T = -np.arange(1, context.num_trained + 1, dtype=np.float32)
    keep_teacher_logprobs(context, values_T)
    taught = [span for span in context.spans if span.trained]
    assert [v for span in taught for v in span.teacher_logprobs] == values_T.tolist()
    assert all(len(span.teacher_logprobs) == len(span.token_ids) for span in taught)
    assert all(span.teacher_logprobs is None for span in context.spans if not span.trained)
    assert [replace(span, teacher_logprobs=None) for span in context.spans] == before
