"""Proves on real tokens, before the first update, that distillation does what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from reframe_vl.algorithms.distillation import distillation_loss
from reframe_vl.types import Context, Provenance

_NOT_FINITE = {
    "student": "The student gives log-probs that are NaN or infinite. Its checkpoint is damaged, "
    "or overflows in its dtype (model.path, model.dtype)",
    "teacher": "A teacher gives log-probs that are NaN or infinite. Its checkpoint is damaged, or "
    "overflows in its dtype (algorithm.teachers.paths, algorithm.teachers.dtype)",
    "weights": "The tokens' weights in the loss are NaN or infinite. Look at "
    "algorithm.settings.injected_weight",
}

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
    for whose, values_T in (
        ("student", own_T),
        ("teacher", inputs["teacher_T"][~injected_T]),
        ("weights", inputs["weights_T"]),
    ):
        # NaN differs from itself: the comparisons below would blame the program.
        if not values_T.isfinite().all():
            raise ValueError(f"{_NOT_FINITE[whose]}: training cannot begin.")
    trained = [span for context in contexts for span in context.spans if span.trained]
    if any(span.provenance not in _DISTILLED for span in trained):
        _fail("tokens that were neither sampled nor injected would be trained")
    marks = [span.provenance is Provenance.INJECTED for span in trained for _ in span.token_ids]
    if marks != injected_T.tolist():
        _fail("the marks of injected tokens do not match the contexts")
    same = {**inputs, "teacher_T": own_T, "advantages_T": torch.zeros_like(own_T)}
    _, gradient_T = _loss_and_gradient(own_T, same, band)
    if bool((gradient_T[~injected_T] != 0).any()):
        _fail("a teacher equal to the student pulls on sampled tokens")
    loss, gradient_T = _loss_and_gradient(own_T, inputs, band)
    nothing = {
        name: torch.where(injected_T, torch.nan, inputs[name])
        for name in ("teacher_T", "sampler_T", "advantages_T")
    }
    other, other_gradient_T = _loss_and_gradient(own_T, {**inputs, **nothing}, band)
    if not (torch.equal(loss, other) and torch.equal(gradient_T, other_gradient_T)):
        _fail("teacher or sampler have a say in injected tokens")


def _loss_and_gradient(
    logprobs_T: Float[Tensor, "T"], inputs: Mapping[str, Tensor], band: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf_T = logprobs_T.clone().requires_grad_(True)
        loss, _ = distillation_loss(leaf_T, **inputs, band=band)
        (gradient_T,) = torch.autograd.grad(loss, leaf_T)
    return loss.detach(), gradient_T


def _fail(what: str) -> None:
    raise RuntimeError(
        f"The self-check of distillation failed: {what}. This is a fault of the program, not of "
        "the data; algorithm.settings.self_check=false trains all the same."
    )
