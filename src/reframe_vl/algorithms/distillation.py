"""The losses of OG-MOPD (docs/method.md, 1.2): pure functions of tokens' log-probs.

As in ``losses``, weights hold the normalisers of the whole optimiser step over all ranks, so that
losses of micro-batches add up. Sampled tokens (S) and injected ones (I) never mix: injected tokens
have no sampler, so neither a ratio w nor an advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reframe_vl.algorithms.losses import (
    Metrics,
    masked,
    nll_loss,
    sampler_metrics,
    sampler_ratio,
    select,
)

Divergence: TypeAlias = Literal["sampled", "top_k", "full"]


def distillation_loss(
    logprobs_T: Float[Tensor, "T"],
    teacher_T: Float[Tensor, "T"],
    sampler_T: Float[Tensor, "T"],
    injected_T: Bool[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
    advantages_T: Float[Tensor, "T"],
    *,
    band: tuple[float, float],
) -> tuple[Float[Tensor, ""], Metrics]:
    """``L_MOPD(S) + lambda_br * L_NLL(I)``.

    ``L_MOPD = -sum_S weight * w * A * log pi`` with ``A = sg[log pi_T - log pi] + advantage`` and
    ``w = sg[pi / mu]`` where that lies in the band, else 0: dropped and not clipped, yet counted in
    the normaliser (MiMo-V2-Flash's MOPD, arXiv 2601.02780).

    Args:
        logprobs_T: Of the student that is trained.
        teacher_T: Of the teacher of each token's domain.
        sampler_T: Mu, what the engine reported; NaN where it gave none: w is 1 there.
        injected_T: Which tokens the environment wrote.
        weights_T: 1 / abs(S) for sampled, lambda_br / abs(I) for injected tokens.
        advantages_T: Added to the teacher's; 0 for plain distillation.
        band: [eps_low, eps_high].

    Returns:
        The loss and its metrics: ``tokens``, those of ``losses.sampler_metrics`` on the sampled
        tokens, ``injected_tokens`` and ``injected_nll_sum``.
    """
    active_T = (weights_T != 0) & ~injected_T
    own_T = select(active_T, logprobs_T)
    sampler_T = select(active_T, sampler_T).detach()
    ratio_T = sampler_ratio(own_T, sampler_T)
    w_T = masked(ratio_T, band)
    # Dropped tokens may be infinitely far from the teacher: they leave before any product.
    advantages_T = select(active_T & (w_T != 0), teacher_T - own_T + advantages_T).detach()
    kept_T = torch.where(w_T != 0, own_T, 0.0)
    mopd = -(weights_T.detach().float() * w_T * advantages_T * kept_T).sum()
    nll = nll_loss(logprobs_T, torch.where(injected_T, weights_T, 0.0))
    with torch.no_grad():
        metrics = {
            "tokens": active_T.sum(),
            **sampler_metrics(own_T, sampler_T, ratio_T, w_T, active_T),
            **_injected_metrics(logprobs_T, injected_T),
        }
    return mopd + nll, metrics


def divergence_loss(
    kl_T: Float[Tensor, "T"],
    logprobs_T: Float[Tensor, "T"],
    injected_T: Bool[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
) -> tuple[Float[Tensor, ""], Metrics]:
    """The same with each sampled position's expected divergence in place of its sampled form.

    Args:
        kl_T: ``policy.divergence.reverse_kl`` at each token, with its gradient.
        logprobs_T: Of the student.
        injected_T: Which tokens the environment wrote.
        weights_T: As of ``distillation_loss``.

    Returns:
        The loss and its metrics: ``tokens``, ``injected_tokens``, ``injected_nll_sum``.
    """
    sampled_T = torch.where(injected_T, 0.0, weights_T)
    kl = (sampled_T * torch.where(sampled_T != 0, kl_T, 0.0)).sum()
    loss = kl + nll_loss(logprobs_T, torch.where(injected_T, weights_T, 0.0))
    return loss, {"tokens": (~injected_T).sum(), **_injected_metrics(logprobs_T, injected_T)}


def _injected_metrics(logprobs_T: Float[Tensor, "T"], injected_T: Bool[Tensor, "T"]) -> Metrics:
    nll_T = torch.where(injected_T, -logprobs_T.detach(), 0.0)
    return {"injected_tokens": injected_T.sum(), "injected_nll_sum": nll_T.sum()}


def outside_band(
    logprobs_T: Float[Tensor, "T"], sampler_T: Float[Tensor, "T"], band: tuple[float, float]
) -> Bool[Tensor, "T"]:
    """Tokens whose ratio of trainer to sampler lies outside of the band; none without a sampler."""
    return masked(sampler_ratio(logprobs_T.float(), sampler_T.float()), band) == 0


def domain_metrics(
    gap_T: Float[Tensor, "T"],
    dropped_T: Bool[Tensor, "T"],
    injected_T: Bool[Tensor, "T"],
    domains: Sequence[str],
) -> Metrics:
    """Sums a domain, for logging alone: the loss pools domains.

    Args:
        gap_T: The student's log-prob less the teacher's (or the divergence itself): its mean over
            sampled tokens estimates the reverse KL.
        dropped_T: Sampled tokens outside of the band.
        injected_T: Which tokens the environment wrote.
        domains: Of each token.

    Returns:
        For each domain ``<domain>/tokens`` (sampled), ``<domain>/kl_sum``,
        ``<domain>/dropped_sum`` and ``<domain>/injected_tokens``.
    """
    metrics: Metrics = {}
    for domain in sorted(set(domains)):
        mine_T = torch.tensor([d == domain for d in domains], device=gap_T.device)
        sampled_T = mine_T & ~injected_T
        metrics |= {
            f"{domain}/tokens": sampled_T.sum(),
            f"{domain}/kl_sum": torch.where(sampled_T, gap_T.detach(), 0.0).sum(),
            f"{domain}/dropped_sum": (sampled_T & dropped_T).sum(),
            f"{domain}/injected_tokens": (mine_T & injected_T).sum(),
        }
    return metrics
