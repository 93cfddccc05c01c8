"""Proves on real tokens, before the first update, that distillation does what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reframe_vl.algorithms.distillation import distillation_loss, divergence_loss
from reframe_vl.types import Context, Provenance

_NOT_FINITE = {
    "student": "The student gives log-probs that are NaN or infinite. Its checkpoint is damaged, "
    "or overflows in its dtype (model.path, model.dtype)",
    "teacher": "A teacher gives log-probs that are NaN or infinite. Its checkpoint is damaged, or "
    "overflows in its dtype (algorithm.teachers.paths, algorithm.teachers.dtype)",
    "weights": "The tokens' weights in the loss are NaN or infinite. Look at "
    "algorithm.settings.injected_weight",
}

Loss = Callable[[Tensor], Tensor]
"""Of the student's log-probs."""

_DISTILLED = (Provenance.SAMPLED, Provenance.INJECTED)


def check_distillation(
    contexts: Sequence[Context],
    logprobs_T: Float[Tensor, "T"],
    inputs: Mapping[str, Tensor],
    band: tuple[float, float],
) -> None:
    """Checks a micro-batch in three ways.

    - A teacher that is the student itself gives no loss and no gradient on sampled tokens.
    - What is trained is what was sampled or injected, never what was observed.
    - Whatever stands for teacher and sampler at injected tokens changes nothing.

    Args:
        contexts: Of the micro-batch.
        logprobs_T: Of the student.
        inputs: The other tensors of ``distillation_loss``, by name.
        band: Its band.

    Raises:
        RuntimeError: One of them fails; training must not begin.
        ValueError: Student or teacher give numbers that are not finite, which nothing can be
            computed with.
    """
    injected_T, own_T = inputs["injected_T"], logprobs_T.detach()
    _check_finite(
        student=own_T, teacher=inputs["teacher_T"][~injected_T], weights=inputs["weights_T"]
    )
    _check_marks(contexts, injected_T)

    def loss(leaf_T: Tensor, **other: Tensor) -> Tensor:
        return distillation_loss(leaf_T, **{**inputs, **other}, band=band)[0]

    equal = partial(loss, teacher_T=own_T, advantages_T=torch.zeros_like(own_T))
    if bool((_gradient(equal, own_T)[~injected_T] != 0).any()):
        _fail("a teacher equal to the student pulls on sampled tokens")
    nothing = {
        name: torch.where(injected_T, torch.nan, inputs[name])
        for name in ("teacher_T", "sampler_T", "advantages_T")
    }
    _check_alike(loss, partial(loss, **nothing), own_T)


def check_divergence(
    contexts: Sequence[Context],
    logprobs_T: Float[Tensor, "T"],
    kl_T: Float[Tensor, "T"],
    injected_T: Bool[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
) -> None:
    """The same of the loss that takes whole distributions.

    That a distribution has no divergence from itself needs no check.

    Args:
        contexts: Of the micro-batch.
        logprobs_T: Of the student.
        kl_T: Its divergence from the teacher.
        injected_T: Which tokens the environment wrote.
        weights_T: As of ``distillation_loss``.

    Raises:
        RuntimeError: As ``check_distillation``.
        ValueError: As ``check_distillation``.
    """
    own_T, given_T = logprobs_T.detach(), kl_T.detach()
    _check_finite(student=own_T, teacher=given_T[~injected_T], weights=weights_T)
    _check_marks(contexts, injected_T)

    def loss(leaf_T: Tensor, given_T: Tensor) -> Tensor:
        return divergence_loss(given_T, leaf_T, injected_T, weights_T)[0]

    nothing_T = torch.where(injected_T, torch.nan, given_T)
    _check_alike(partial(loss, given_T=given_T), partial(loss, given_T=nothing_T), own_T)


def _check_finite(**values: Tensor) -> None:
    for whose, values_T in values.items():
        # NaN differs from itself: the comparisons would blame the program.
        if not values_T.isfinite().all():
            raise ValueError(f"{_NOT_FINITE[whose]}: training cannot begin.")


def _check_marks(contexts: Sequence[Context], injected_T: Bool[Tensor, "T"]) -> None:
    trained = [span for context in contexts for span in context.spans if span.trained]
    if any(span.provenance not in _DISTILLED for span in trained):
        _fail("tokens that were neither sampled nor injected would be trained")
    marks = [span.provenance is Provenance.INJECTED for span in trained for _ in span.token_ids]
    if marks != injected_T.tolist():
        _fail("the marks of injected tokens do not match the contexts")


def _check_alike(loss: Loss, other: Loss, logprobs_T: Float[Tensor, "T"]) -> None:
    """Two losses that differ in what stands at injected tokens alone."""
    same = torch.equal(loss(logprobs_T), other(logprobs_T))
    if not (same and torch.equal(_gradient(loss, logprobs_T), _gradient(other, logprobs_T))):
        _fail("teacher or sampler have a say in injected tokens")


def _gradient(loss: Loss, logprobs_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    with torch.enable_grad():
        leaf_T = logprobs_T.clone().requires_grad_(True)
        # A micro-batch may have nothing that depends on them.
        (gradient_T,) = torch.autograd.grad(loss(leaf_T), leaf_T, materialize_grads=True)
    return gradient_T


def _fail(what: str) -> None:
    raise RuntimeError(
        f"The self-check of distillation failed: {what}. This is a fault of the program, not of "
        "the data; algorithm.settings.self_check=false trains all the same."
    )
