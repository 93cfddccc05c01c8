import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_step import SGD, assert_same, fit, fixed_groups, tiny_policy
from reframe_vl.algorithms.ekipl import EKIPL, EKIPLSettings
from reframe_vl.algorithms.selection import keep_best, pool_numbers
from reframe_vl.policy.score import score
from reframe_vl.types import Provenance, Rollout, RolloutGroup, RolloutKey, Sampling, Termination
from scripted import sample
from tiny import sampling, tiny_model

REWARDS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 1.0 + 1e-12, 2.0]), st.booleans()), min_size=1, max_size=12
)


@given(REWARDS, st.integers(1, 8), st.integers(0, 2**128))
def test_the_best_of_a_pool_are_kept_as_a_slow_reference_keeps_them(pool, keep, seed):
    rewards, alive = (list(column) for column in zip(*pool, strict=True))
    kept = keep_best(torch.tensor(rewards, dtype=torch.float64), torch.tensor(alive), keep, seed)
    chosen = [round(rewards[i]) for i in kept.nonzero().flatten().tolist()]
    assert all(alive[i] for i in kept.nonzero().flatten().tolist())
    best = sorted((round(r) for r, here in pool if here), reverse=True)[:keep]
    assert sorted(chosen, reverse=True) == best
    again = keep_best(torch.tensor(rewards, dtype=torch.float64), torch.tensor(alive), keep, seed)
    assert torch.equal(kept, again)


def test_ties_are_broken_at_random_by_seed():
    rewards, alive = torch.ones(6), torch.ones(6, dtype=torch.bool)
    counts = sum(keep_best(rewards, alive, 2, seed).int() for seed in range(600))
    # Each of six is kept with probability 1/3: 200 times, give or take 12.
    assert counts.sum() == 1200 and (counts - 200).abs().max() < 60


def test_a_rollout_without_a_reward_is_never_kept_whatever_it_holds():
    rewards = torch.tensor([math.nan, 0.0, math.inf, 1.0])
    alive = torch.tensor([False, True, False, True])
    assert keep_best(rewards, alive, 3, 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_has_no_place_in_an_order_is_refused(value):
    with pytest.raises(ValueError, match="not all finite"):
        keep_best(torch.tensor([0.5, value, 1.0]), torch.ones(3, dtype=torch.bool), 1, 0)


def rollout(advantage, author="", reward=1.0):
    key = RolloutKey(0, 0, "s", 0, author)
    made = Rollout(key, [], Sampling(), Termination.ANSWERED, reward=reward)
    made.advantage = advantage
    return made


def test_what_was_kept_is_told_in_numbers():
    mixed = [rollout(1.0), rollout(-1.0, "a"), rollout(0.5, "a"), rollout(None, "a", None)]
    dead = [rollout(0.0), rollout(0.0), rollout(None)]
    groups = [RolloutGroup(sample(), members) for members in (mixed, dead)]
    assert pool_numbers(groups, 3) == {
        "own_share": 3 / 5,
        "own_share_above": 1 / 2,
        "zero_variance": 1.0,
        "kept_rollouts": 5.0,
        "shortfall": 1.0,
        "not_scorable": 1.0,
    }


# ------------------------------------------------------------------ the step


def pools(model, logprobs=None):
    """Groups of eight, every other one written by somebody else; some failed."""
    groups = fixed_groups(model, sampling(), num_groups=3, size=8)
    for group in groups:
        for index, member in enumerate(group.rollouts):
            author = "good" if index % 2 else ""
            provenance = Provenance.EXTERNAL if author else Provenance.SAMPLED
            member.key = dataclasses.replace(member.key, author=author)
            for context in member.contexts:
                context.spans = [
                    dataclasses.replace(
                        span,
                        provenance=provenance,
                        logprobs=(logprobs,) * len(span.token_ids) if author and logprobs else None,
                    )
                    if span.trained
                    else span
                    for span in context.spans
                ]
    groups[0].rollouts[1].reward = None
    groups[0].rollouts[1].termination = Termination.ERROR
    return groups


def reference_model():
    return tiny_model("qwen3_vl", seed=5).requires_grad_(False).eval()


def step(settings, make=pools, micro=2):
    policy = tiny_policy()
    module = EKIPL(settings, policy=policy, optimizer=SGD)
    # A reference that differs: at the initial policy the penalty has no gradient.
    object.__setattr__(module, "_reference", reference_model())
    groups = make(policy.model)
    return fit(module, groups, micro), groups, module


def by_hand(settings, make=pools):
    """The loss from its formulas, one context and one token at a time."""
    model, other = tiny_policy().model, reference_model()
    groups = make(model)
    kept = []
    for group in groups:
        alive = [r for r in group.rollouts if r.reward is not None]
        best = sorted(alive, key=lambda r: -r.reward)[: settings.keep]
        mean, std = np.mean([r.reward for r in best]), np.std([r.reward for r in best])
        dead = std == 0
        kept += [(r, 0.0 if dead else (r.reward - mean) / (std + 1e-4)) for r in best]
    tokens = sum(context.num_trained for r, _ in kept for context in r.contexts)
    loss = torch.zeros(())
    for member, advantage in kept:
        for context in member.contexts:
            own = score(model, [context], member.sampling).logprobs_T
            with torch.no_grad():
                ref = score(other, [context], member.sampling).logprobs_T
            spans = [s for s in context.spans if s.trained]
            written = [(s.provenance, lp) for s in spans for lp in s.logprobs or [None] * len(s)]
            for position, (provenance, theirs) in enumerate(written):
                logprob, factor = own[position], 1.0
                if settings.auxiliary_ratio and theirs is not None:
                    factor = min(math.exp(float(logprob) - theirs), settings.importance_cap)
                loss = loss - advantage * factor * logprob
                if provenance is Provenance.SAMPLED:
                    gap = ref[position] - logprob
                    loss = loss + settings.kl_coef * (gap.exp() - gap - 1)
    (loss / tokens).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def different_rewards(model, **how):
    """No ties among which a random choice would have to be followed."""
    groups = pools(model, **how)
    for member in groups[1].rollouts:
        member.reward = 1.0 + member.key.index / 10
    return groups


def test_the_gradient_equals_loops_written_from_the_formulas():
    settings = EKIPLSettings(keep=4, kl_coef=0.3)
    found, groups, module = step(settings, different_rewards)
    assert_same(found, by_hand(settings, different_rewards), 5e-6)
    assert all(sum(r.advantage is not None for r in g.rollouts) == 4 for g in groups)
    assert groups[0].rollouts[1].advantage is None
    logged = module.trainer.callback_metrics
    assert logged["selection/kept_rollouts"] == 12 and logged["selection/not_scorable"] == 2


def test_the_ratio_to_an_auxiliarys_own_probability_is_an_option():
    settings = EKIPLSettings(keep=4, kl_coef=0.3, auxiliary_ratio=True, importance="truncated")

    def make(model):
        return different_rewards(model, logprobs=-7.0)

    assert_same(step(settings, make)[0], by_hand(settings, make), 5e-6)
    without = EKIPLSettings(keep=4, kl_coef=0.3, importance="truncated")
    assert_same(step(without, make)[0], by_hand(without, make), 5e-6)


def test_a_pool_of_the_policy_alone_that_is_kept_whole_is_grpo():
    from one_step import gradient
    from reframe_vl.algorithms.gdgrpo import GRPOSettings

    def own(model):
        return fixed_groups(model, sampling())

    policy = tiny_policy()
    module = EKIPL(EKIPLSettings(keep=4), policy=policy, optimizer=SGD)
    found = fit(module, own(policy.model), 1)
    assert_same(found, gradient(1, GRPOSettings(subgroups=False)))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"keep": 1}, "keep 2 or more"),
        ({"auxiliary_ratio": True}, "importance=truncated"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        EKIPLSettings(**given)
