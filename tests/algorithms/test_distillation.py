"""OG-MOPD's loss against loops written from its formulas, and the facts that define it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.algorithms.distillation import distillation_loss, divergence_loss, domain_metrics
from reframe_vl.algorithms.self_check import check_distillation, check_divergence
from reframe_vl.policy.divergence import reverse_kl
from reframe_vl.types import Context, Provenance, Span

BAND = (0.5, 2.0)


def tokens(seed, count):
    rng = torch.Generator().manual_seed(seed)

    def draw(scale=1.0):
        return torch.randn(count, generator=rng) * scale

    logprobs_T = -draw().abs()
    return {
        "logprobs_T": logprobs_T,
        "teacher_T": -draw().abs(),
        "sampler_T": logprobs_T + draw(0.6),
        "injected_T": torch.rand(count, generator=rng) < 0.3,
        "advantages_T": draw(),
    }


def slow_loss(logprobs_T, teacher_T, sampler_T, injected_T, advantages_T, bridge, band):
    """One token at a time; the counts are of the tokens given."""
    sampled = [t for t in range(len(logprobs_T)) if not injected_T[t]]
    injected = [t for t in range(len(logprobs_T)) if injected_T[t]]
    loss = logprobs_T.sum() * 0.0
    for t in sampled:
        ratio = math.exp(logprobs_T[t].item() - sampler_T[t].item())
        w = ratio if band[0] <= ratio <= band[1] else 0.0
        advantage = teacher_T[t].item() - logprobs_T[t].item() + advantages_T[t].item()
        loss = loss - w * advantage * logprobs_T[t] / len(sampled)
    for t in injected:
        loss = loss - bridge * logprobs_T[t] / len(injected)
    return loss


def weights(injected_T, bridge):
    sampled, injected = int((~injected_T).sum()), int(injected_T.sum())
    return torch.where(injected_T, bridge / max(injected, 1), 1 / max(sampled, 1))


@given(st.integers(0, 10_000), st.integers(0, 12), st.floats(0, 3))
def test_the_loss_and_its_gradient_are_those_of_the_formulas(seed, count, bridge):
    inputs = tokens(seed, count)
    leaf_T = inputs["logprobs_T"].requires_grad_(True)
    expected = slow_loss(**inputs, bridge=bridge, band=BAND)
    loss, metrics = distillation_loss(
        **inputs, weights_T=weights(inputs["injected_T"], bridge), band=BAND
    )
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaf_T)[0],
        torch.autograd.grad(expected, leaf_T)[0],
        atol=1e-6,
        rtol=1e-5,
    )
    assert metrics["injected_tokens"] == inputs["injected_T"].sum()


def test_injected_tokens_have_neither_ratio_nor_advantage():
    inputs = tokens(0, 20)
    share = weights(inputs["injected_T"], 1.0)
    loss, _ = distillation_loss(**inputs, weights_T=share, band=BAND)
    for name in ("teacher_T", "sampler_T", "advantages_T"):
        inputs[name] = torch.where(inputs["injected_T"], torch.nan, inputs[name])
    other, _ = distillation_loss(**inputs, weights_T=share, band=BAND)
    assert torch.equal(loss, other)


def test_a_token_outside_the_band_is_dropped_and_stays_in_the_count():
    inputs = {
        "logprobs_T": torch.tensor([-1.0, -1.0], requires_grad=True),
        "teacher_T": torch.tensor([-0.5, -0.5]),
        "sampler_T": torch.tensor([-1.0, -3.0]),
        "injected_T": torch.tensor([False, False]),
        "advantages_T": torch.zeros(2),
    }
    loss, metrics = distillation_loss(**inputs, weights_T=torch.full((2,), 0.5), band=BAND)
    (gradient,) = torch.autograd.grad(loss, inputs["logprobs_T"])
    torch.testing.assert_close(gradient, torch.tensor([-0.25, 0.0]))
    assert metrics["importance_masked"] == 1


def test_c14_a_token_without_a_sampler_has_ratio_one():
    inputs = tokens(1, 6)
    inputs["injected_T"][:] = False
    inputs["sampler_T"][:] = torch.nan
    loss, metrics = distillation_loss(**inputs, weights_T=torch.full((6,), 1 / 6), band=BAND)
    expected = slow_loss(**(inputs | {"sampler_T": inputs["logprobs_T"]}), bridge=0, band=BAND)
    torch.testing.assert_close(loss, expected)
    assert metrics["logprobs_missing"] == 6


@pytest.mark.parametrize("size", [2, 7])
def test_the_full_form_has_the_expected_gradient_of_the_sampled_one(size):
    torch.manual_seed(0)
    logits_V = torch.randn(size, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(size, dtype=torch.float64).log_softmax(-1)
    student_V = logits_V.log_softmax(-1)
    full = reverse_kl(student_V[None], teacher_V[None])[0]
    (expected,) = torch.autograd.grad(full, logits_V, retain_graph=True)
    mean = torch.zeros_like(logits_V)
    for token in range(size):
        # Mu is the student and the band is open.
        loss, _ = distillation_loss(
            student_V[token][None],
            teacher_V[token][None],
            student_V[token][None].detach(),
            torch.tensor([False]),
            torch.ones(1),
            torch.zeros(1),
            band=(0.0, math.inf),
        )
        (gradient,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
        mean += student_V[token].exp().detach() * gradient
    # Losses are in single precision.
    torch.testing.assert_close(mean, expected, atol=1e-6, rtol=1e-5)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_top_k_is_a_lower_bound_that_all_tokens_reach(seed, k):
    rng = torch.Generator().manual_seed(seed)
    student = torch.randn(3, 9, generator=rng).mul(2).log_softmax(-1)
    teacher = torch.randn(3, 9, generator=rng).mul(2).log_softmax(-1)
    full = reverse_kl(student, teacher)
    part = reverse_kl(student, teacher, k)
    assert bool((part <= full + 1e-5).all())
    assert bool((part >= -1e-5).all())
    if k == 9:
        torch.testing.assert_close(part, full)


def test_tokens_that_cannot_be_drawn_do_not_touch_the_divergence():
    student = torch.tensor([[0.0, 1.0, -math.inf]]).log_softmax(-1).requires_grad_(True)
    teacher = torch.tensor([[1.0, 0.0, -math.inf]]).log_softmax(-1)
    kl = reverse_kl(student, teacher)
    torch.testing.assert_close(kl, reverse_kl(student[:, :2], teacher[:, :2]))
    kl.sum().backward()
    assert bool(student.grad.isfinite().all())


def test_the_divergence_form_keeps_injected_tokens_apart():
    inputs = tokens(3, 10)
    kl_T = torch.rand(10, requires_grad=True)
    share = weights(inputs["injected_T"], 2.0)
    loss, _ = divergence_loss(kl_T, inputs["logprobs_T"], inputs["injected_T"], share)
    sampled = ~inputs["injected_T"]
    expected = kl_T[sampled].mean() - 2.0 * inputs["logprobs_T"][inputs["injected_T"]].mean()
    torch.testing.assert_close(loss, expected)


def test_domains_are_counted_apart():
    metrics = domain_metrics(
        torch.tensor([1.0, 2.0, 4.0, 8.0]),
        torch.tensor([True, False, False, True]),
        torch.tensor([False, False, False, True]),
        ["image", "video", "image", "image"],
    )
    assert {name: float(value) for name, value in metrics.items()} == {
        "image/tokens": 2,
        "image/kl_sum": 5,
        "image/dropped_sum": 1,
        "image/injected_tokens": 1,
        "video/tokens": 1,
        "video/kl_sum": 2,
        "video/dropped_sum": 0,
        "video/injected_tokens": 0,
    }


INJECTED = Span(Provenance.INJECTED, (5,))


def checked(provenance=Provenance.INJECTED, marks=(False, False, True)):
    context = Context(
        [
            Span(Provenance.PROMPT, (1, 2)),
            Span(Provenance.SAMPLED, (3, 4), logprobs=(-1.0, -1.0)),
            Span(provenance, (5,)),
            Span(Provenance.OBSERVED, (6, 7)),
        ]
    )
    inputs = {
        "teacher_T": torch.tensor([-1.0, -2.0, -3.0]),
        "sampler_T": torch.tensor([-1.0, -1.0, torch.nan]),
        "injected_T": torch.tensor(marks),
        "weights_T": torch.tensor([0.5, 0.5, 1.0]),
        "advantages_T": torch.zeros(3),
    }
    check_distillation([context], torch.tensor([-1.1, -1.2, -1.3]), inputs, BAND)


def test_the_self_check_passes_on_sound_tokens_and_fails_on_others():
    checked()
    with pytest.raises(RuntimeError, match="neither sampled nor injected"):
        checked(provenance=Provenance.EXTERNAL)
    with pytest.raises(RuntimeError, match="do not match"):
        checked(marks=(True, False, True))


def test_the_self_check_of_whole_distributions_looks_at_the_same():
    context = Context([Span(Provenance.SAMPLED, (3,), logprobs=(-1.0,)), INJECTED])
    logprobs_T, weights_T = torch.tensor([-1.0, -2.0]), torch.ones(2)

    def check(kl, marks):
        check_divergence([context], logprobs_T, torch.tensor(kl), torch.tensor(marks), weights_T)

    check([0.5, 9.0], [False, True])
    with pytest.raises(RuntimeError, match="do not match"):
        check([0.5, 9.0], [True, False])
    with pytest.raises(ValueError, match="A teacher gives"):
        check([float("nan"), 9.0], [False, True])


def test_the_self_check_bears_a_micro_batch_of_canonical_calls_alone():
    inputs = {
        "teacher_T": torch.zeros(1),
        "sampler_T": torch.tensor([torch.nan]),
        "injected_T": torch.tensor([True]),
        "weights_T": torch.ones(1),
        "advantages_T": torch.zeros(1),
    }
    check_distillation([Context([INJECTED])], torch.tensor([-1.0]), inputs, BAND)
