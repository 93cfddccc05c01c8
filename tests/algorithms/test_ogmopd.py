"""Distillation's step as a whole, against per-token loops with transformers' own forward."""

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from one_step import (
    SGD,
    TEACHERS,
    assert_same,
    distilled_gradient,
    distilled_groups,
    fit,
    fixed_groups,
    tiny_policy,
)
from rank_cases import Case, policy_of, teachers_of
from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.algorithms.ogmopd import OGMOPD, DistillationSettings
from reframe_vl.policy.teachers import FrozenModel, Teachers
from reframe_vl.strategies import FSDP2
from reframe_vl.types import Provenance, Termination
from tiny import sampling, tiny_model

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def whole():
    return distilled_gradient(1)


def tables(model, context, how):
    """Log-probabilities at every trained position, by one plain forward."""
    row = model.expand(context)
    logits = model.base(
        input_ids=torch.from_numpy(row.token_ids)[None],
        pixel_values=torch.from_numpy(model.view_maker.patches([v for _, v in row.blocks])),
        image_grid_thw=torch.tensor([v.grid_thw for _, v in row.blocks]),
        mm_token_type_ids=torch.from_numpy(row.image_mask).int()[None],
    ).logits[0]
    allowed = logits[row.trained - 1].clone()
    allowed[:, list(how.banned_ids)] = float("-inf")
    return allowed.log_softmax(-1), row.token_ids[row.trained]


def slow_gradient(form):
    model, how = tiny_model("qwen3_vl"), sampling()
    teachers = {domain: tiny_model("qwen3_vl", seed=seed) for domain, seed in TEACHERS.items()}
    with torch.no_grad():
        groups = distilled_groups(model, how)
    sampled, injected = [], []
    for group in groups:
        for rollout in group.rollouts:
            if rollout.termination is Termination.ERROR:
                continue
            for context in rollout.contexts:
                mine, ids = tables(model, context, how)
                with torch.no_grad():
                    theirs, _ = tables(teachers[group.sample.domain], context, how)
                known = [
                    (span.provenance, None if span.logprobs is None else span.logprobs[i])
                    for span in context.spans
                    if span.trained
                    for i in range(len(span.token_ids))
                ]
                for t, (provenance, mu) in enumerate(known):
                    logprob = mine[t, ids[t]]
                    if provenance is Provenance.INJECTED:
                        injected.append(-logprob)
                    elif form == "full":
                        drawn = mine[t].isfinite()
                        gap = mine[t][drawn] - theirs[t][drawn]
                        sampled.append((mine[t][drawn].exp() * gap).sum())
                    else:
                        ratio = float(torch.exp(logprob.detach() - mu))
                        w = ratio if 0.5 <= ratio <= 2.0 else 0.0
                        advantage = float(theirs[t, ids[t]] - logprob.detach())
                        sampled.append(-w * advantage * logprob)
    assert len(injected) > 10
    (torch.stack(sampled).mean() + torch.stack(injected).mean()).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def test_the_gradient_equals_loops_written_from_the_formulas(whole):
    assert_same(whole, slow_gradient("sampled"), 2e-6)


def test_the_full_divergence_equals_loops_too():
    found = distilled_gradient(2, DistillationSettings(divergence="full"))
    assert_same(found, slow_gradient("full"), 2e-6)


@pytest.mark.parametrize("micro", [3, 8])
def test_micro_batches_add_up_to_one_big_batch_empty_ones_included(whole, micro):
    assert_same(distilled_gradient(micro), whole)


def test_two_gloo_ranks_have_the_gradient_of_one_big_batch(whole, tmp_path):
    out = tmp_path / "gradient.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    done = subprocess.run(
        [*command, str(TESTS / "one_step.py"), "--micro=2", "--distil", f"--out={out}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert_same(torch.load(out), whole)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"eps_low": 1.5}, "must hold 1"),
        ({"injected_weight": -1}, "0 or more"),
        ({"injected_weight": float("inf")}, "finite number"),
        ({"outcome_weight": float("nan")}, "finite number"),
        ({"updates": 0}, "at least 1"),
        ({"outcome_weight": 1.0, "divergence": "full"}, "divergence=sampled"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        DistillationSettings(**settings)


def damage(model):
    with torch.no_grad():
        model.base.lm_head.weight[7, 0] = torch.nan
    return model


def fails_before_any_update(module, groups, **told):
    """Trains, which must fail and leave the policy as it was."""
    before = {n: p.detach().clone() for n, p in module.policy.named_parameters()}
    with pytest.raises(told["error"], match=told["match"]):
        fit(module, groups, 2)
    for name, parameter in module.policy.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.parametrize("form", ["sampled", "full", "top_k"])
@pytest.mark.parametrize("self_check", [True, False])
def test_a_teacher_that_is_not_finite_is_named_before_any_update(form, self_check):
    policy = tiny_policy()
    teachers = Teachers({"a": "sound", "b": "damaged"}, {"image": "a", "video": "b"})
    teachers.add("a", FrozenModel(tiny_model("qwen3_vl", seed=1), policy.model))
    teachers.add("b", FrozenModel(damage(tiny_model("qwen3_vl", seed=2)), policy.model))
    settings = DistillationSettings(divergence=form, self_check=self_check)
    module = OGMOPD(teachers, settings, policy=policy, optimizer=SGD)
    with torch.no_grad():
        groups = distilled_groups(policy.model, sampling())
    words = r"Teacher b \(teachers\.b=damaged\) gives log-probs of domain video that are NaN"
    fails_before_any_update(module, groups, error=ValueError, match=words)


def test_a_student_that_is_not_finite_is_not_blamed_on_the_program_or_a_teacher():
    told = (ValueError, "The student gives log-probs that are NaN")
    ended = (FloatingPointError, "loss of step 0 is nan")
    for form, self_check in itertools.product(("sampled", "full"), (True, False)):
        settings = DistillationSettings(divergence=form, self_check=self_check)
        error, match = told if self_check else ended
        policy = tiny_policy()
        teachers = Teachers({"a": "x"}, {"image": "a", "video": "a"})
        teachers.add("a", FrozenModel(tiny_model("qwen3_vl", seed=1), policy.model))
        with torch.no_grad():
            groups = distilled_groups(policy.model, sampling())
        damage(policy.model)
        module = OGMOPD(teachers, settings, policy=policy, optimizer=SGD)
        fails_before_any_update(module, groups, error=error, match=match)


def test_a_loss_that_is_no_number_ends_training_before_the_update():
    policy = tiny_policy()
    groups = fixed_groups(policy.model, sampling())
    damage(policy.model)
    module = GDGRPO(GRPOSettings(), policy=policy, optimizer=SGD)
    fails_before_any_update(
        module, groups, error=FloatingPointError, match="training ends before this"
    )


@pytest.mark.parametrize("divergence", ["full", "top_k"])
def test_adapters_on_a_student_that_is_spread_over_ranks_teach_sampled_tokens_alone(divergence):
    case = Case(lora=True, distilled=DistillationSettings(divergence))
    policy = policy_of(case)
    module = OGMOPD(teachers_of(case, policy), case.distilled, policy=policy, optimizer=SGD)
    module._trainer = SimpleNamespace(strategy=FSDP2(), world_size=2)
    with pytest.raises(ValueError, match="strategy=ddp"):
        module.setup("fit")


def test_the_logged_loss_is_a_mean_over_a_steps_updates():
    logged = []
    for updates in (1, 2, 4):
        policy = tiny_policy()
        module = GDGRPO(
            GRPOSettings(updates=updates), policy=policy, optimizer=partial(SGD, lr=0.0)
        )
        fit(module, fixed_groups(policy.model, sampling()), 1)
        logged.append(float(module.trainer.callback_metrics["train/loss"]))
    # Each update is a mean over its own share of the rollouts.
    assert logged == pytest.approx([logged[0]] * 3, rel=0.3)
