"""Token losses: pure functions of log-probs, each a weighted sum over tokens.

Every loss is ``sum_t w_t * l_t`` and ``w_t`` (``token_weights``) holds the normaliser of the whole
optimiser step over all ranks. Losses of micro-batches therefore simply add up, however unequal the
micro-batches are. Four rules hold throughout:

- Arithmetic is in float32, whatever comes in; the gradient flows through ``logprobs_T`` alone.
- A token of weight 0 may hold anything, NaN and -inf included: tokens are *selected* before any
  arithmetic, since infinity times 0 is NaN.
- Log-ratios are bounded *before* ``exp``; bounding its result would leave a NaN gradient.
- A trained token whose own log-prob is NaN gives a NaN loss. Nothing hides it.

Metrics are detached sums and counts over the tokens of non-zero weight. They add up over
micro-batches and ranks, except ``*_max``, which combine by their maximum; ``*_argmax`` is the
position of that maximum in this call's tokens, -1 where there is none.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

WeightMode: TypeAlias = Literal["token", "sequence", "constant"]
Importance: TypeAlias = Literal["none", "truncated", "masked"]
KLEstimator: TypeAlias = Literal["k1", "k3"]
Metrics: TypeAlias = dict[str, Tensor]

LOG_RATIO_BOUND = 10.0
"""Where log-ratios stop: exp(10), about 22,000, still fits in half precision on the way back."""


def token_weights(
    lengths_N: Int[Tensor, "N"],
    num_rollouts: int,
    mode: WeightMode,
    *,
    total_tokens: int,
    max_tokens: int | None,
) -> Float[Tensor, "N"]:
    """The weight of every trained token of a rollout.

    ``token`` (DAPO, OG-MOPD): ``1 / total_tokens``, all tokens count alike. ``sequence`` (GRPO):
    ``1 / (length_i * num_rollouts)``, all rollouts count alike. ``constant`` (Dr. GRPO):
    ``1 / (max_tokens * num_rollouts)``, free of both length biases.

    A rollout that is masked out as a whole (truncated, say) has length 0 here and is counted in
    neither ``num_rollouts`` nor ``total_tokens``: the same mask above and below.

    Args:
        lengths_N: Trained tokens of each rollout over all its contexts.
        num_rollouts: Rollouts of the whole optimiser step, over all ranks.
        mode: The normaliser.
        total_tokens: Trained tokens of the whole optimiser step, over all ranks.
        max_tokens: For ``constant``: the number of tokens that a rollout may have.

    Returns:
        One weight a rollout; 0 where its length is 0.

    Raises:
        ValueError: If the counts cannot be those of the whole step, or ``max_tokens`` is missing.
    """
    local_tokens, local_rollouts = int(lengths_N.sum()), int((lengths_N > 0).sum())
    if local_tokens > total_tokens or local_rollouts > num_rollouts:
        raise ValueError(
            f"{local_rollouts} rollouts with {local_tokens} trained tokens are here, but the "
            f"optimiser step is said to have {num_rollouts} with {total_tokens}. Pass counts over "
            "all micro-batches and ranks of the step."
        )
    lengths_N = lengths_N.double()
    match mode:
        case "token":
            denominators_N = torch.full_like(lengths_N, total_tokens)
        case "sequence":
            denominators_N = lengths_N * num_rollouts
        case "constant":
            if max_tokens is None or max_tokens < 1:
                raise ValueError(
                    "The 'constant' token weights divide by the tokens that a rollout may have: "
                    f"set max_tokens to at least 1, not {max_tokens}."
                )
            denominators_N = torch.full_like(lengths_N, max_tokens * num_rollouts)
        case _:
            raise ValueError(
                f"Unknown token weights {mode!r}: use 'token', 'sequence' or 'constant'."
            )
    return torch.where(lengths_N > 0, 1.0 / denominators_N, 0.0).float()


def policy_gradient_loss(
    logprobs_T: Float[Tensor, "T"],
    old_logprobs_T: Float[Tensor, "T"] | None,
    sampler_logprobs_T: Float[Tensor, "T"],
    advantages_T: Float[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
    *,
    clip_low: float,
    clip_high: float,
    importance: Importance,
    importance_cap: float,
    importance_band: tuple[float, float],
) -> tuple[Float[Tensor, ""], Metrics]:
    """The clipped surrogate of PPO and GRPO, corrected for the sampler's distribution.

    ``l_t = -c_t * min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)`` with
    ``r_t = pi / pi_old`` and ``c_t = sg[pi_old / mu]``, mu the sampler. On policy r_t is exactly 1
    and the gradient is that of ``-c_t * A_t * log pi``; with ``A_t = sg[log pi_T - log pi]`` and
    ``masked`` it is OG-MOPD's.

    Both ratios are those of single tokens. A product over a rollout would turn a tiny gap a token
    into a factor of its length.

    Args:
        logprobs_T: Of the policy that is trained.
        old_logprobs_T: Before the step's first update; None where the policy is unchanged.
        sampler_logprobs_T: What the engine reported; NaN where it gave none: that token's c_t is
            exactly 1, and it is counted.
        advantages_T: One a token.
        weights_T: See ``token_weights``.
        clip_low: How far r_t may fall below 1 with a gain.
        clip_high: How far r_t may rise above 1 with a gain.
        importance: ``none``: c_t = 1. ``truncated``: at most ``importance_cap``. ``masked``: 0
            outside ``importance_band``; the token stays in the normaliser.
        importance_cap: The largest c_t, for ``truncated``.
        importance_band: The smallest and the largest c_t that are kept, for ``masked``.

    Returns:
        The loss and its metrics: ``tokens``; ``clip_low`` and ``clip_high`` (tokens whose gradient
        the clip removed); ``ratio_sum`` (r_t of the tokens that are not masked);
        ``importance_sum`` and ``importance_max`` (the ratio before it is capped or masked);
        ``importance_masked`` and ``logprobs_missing`` (tokens); ``sampler_gap_sum``,
        ``sampler_gap_max`` and ``sampler_gap_argmax`` (``|log pi - log mu|`` of the tokens that
        have both).
    """
    active_T = weights_T != 0
    logprobs_T = select(active_T, logprobs_T)
    old_T = logprobs_T if old_logprobs_T is None else select(active_T, old_logprobs_T)
    old_T = old_T.detach()
    sampler_T = select(active_T, sampler_logprobs_T).detach()
    advantages_T = select(active_T, advantages_T).detach()
    raw_T = sampler_ratio(old_T, sampler_T)
    correction_T = _correction(raw_T, importance, importance_cap, importance_band)
    # Dropped tokens leave before exp as well: both of their log-probs may be -inf.
    ratio_T = _bounded_exp(torch.where(correction_T != 0, logprobs_T - old_T, 0.0))
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    loss = -(weights_T.detach().float() * correction_T * surrogate_T).sum()

    with torch.no_grad():
        kept_T = active_T & (correction_T != 0)
        metrics = {
            "tokens": active_T.sum(),
            "clip_low": (kept_T & (advantages_T < 0) & (ratio_T < 1 - clip_low)).sum(),
            "clip_high": (kept_T & (advantages_T > 0) & (ratio_T > 1 + clip_high)).sum(),
            "ratio_sum": select(kept_T, ratio_T).sum(),
        } | sampler_metrics(logprobs_T, sampler_T, raw_T, correction_T, active_T)
    return loss, metrics


def sampler_ratio(
    logprobs_T: Float[Tensor, "T"], sampler_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """``sg[pi / mu]`` of each token, bounded before ``exp``; 1 without the sampler's (NaN)."""
    log_ratio_T = logprobs_T.detach() - sampler_T
    return _bounded_exp(torch.where(sampler_T.isnan(), 0.0, log_ratio_T))


def masked(ratio_T: Float[Tensor, "T"], band: tuple[float, float]) -> Float[Tensor, "T"]:
    """Ratios within the band; 0 outside of it: such a token is dropped."""
    # Asked this way round a NaN stays in, to be seen in the loss.
    return torch.where((ratio_T < band[0]) | (ratio_T > band[1]), 0.0, ratio_T)


def sampler_metrics(
    logprobs_T: Float[Tensor, "T"],
    sampler_T: Float[Tensor, "T"],
    ratio_T: Float[Tensor, "T"],
    correction_T: Float[Tensor, "T"],
    active_T: Bool[Tensor, "T"],
) -> Metrics:
    """How far trainer and sampler are apart; see ``policy_gradient_loss``.

    Args:
        logprobs_T: Of the policy; selected.
        sampler_T: Of the sampler; selected.
        ratio_T: Before it is capped or masked.
        correction_T: Afterwards.
        active_T: Tokens that count.
    """
    missing_T = sampler_T.isnan()
    gap_T = torch.where(missing_T, 0.0, _gap(logprobs_T.detach(), sampler_T))
    gap_max, gap_argmax = _largest(gap_T, active_T & ~missing_T)
    importance_max, _ = _largest(ratio_T, active_T)
    return {
        "importance_sum": select(active_T, ratio_T).sum(),
        "importance_max": importance_max,
        "importance_masked": (active_T & (correction_T == 0)).sum(),
        "logprobs_missing": missing_T.sum(),
        "sampler_gap_sum": gap_T.sum(),
        "sampler_gap_max": gap_max,
        "sampler_gap_argmax": gap_argmax,
    }


def kl_penalty(
    logprobs_T: Float[Tensor, "T"],
    ref_logprobs_T: Float[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
    *,
    estimator: KLEstimator,
) -> tuple[Float[Tensor, ""], Metrics]:
    """The sampled reverse KL divergence of the policy from the reference.

    With ``d = log pi_ref - log pi``:

    ``k3``: ``exp(d) - d - 1``, GRPO's. Its value is an unbiased estimate of the reverse KL, at
    least 0 for each token; differentiated as it stands its gradient is ``(1 - exp(d)) * grad log
    pi``, which is that of the *forward* KL. Where d exceeds ``LOG_RATIO_BOUND`` the token has no
    gradient and is counted.

    ``k1``: ``-d``. Differentiated as it stands its gradient would be ``grad log pi`` with no trace
    of the reference, 0 on average on policy: no penalty at all. So the *value* is k1's and the
    *gradient* is the score function's, ``sg[-d] * grad log pi`` (sg[-d] within the bound): what a
    k1 penalty inside the reward gives each token, and the gradient of k2 = d^2 / 2. On policy its
    mean is the gradient of the reverse KL.

    Args:
        logprobs_T: Of the policy that is trained.
        ref_logprobs_T: Of the reference policy.
        weights_T: See ``token_weights``; 0 for tokens that the policy did not sample.
        estimator: The estimator.

    Returns:
        The loss, without its coefficient, and its metrics: ``kl_tokens``; ``kl_sum``;
        ``kl_bounded`` (tokens beyond the bound); ``kl_gap_max`` and ``kl_gap_argmax`` (``|d|``,
        which no weight can hide).
    """
    active_T = weights_T != 0
    logprobs_T = select(active_T, logprobs_T)
    ref_T = select(active_T, ref_logprobs_T).detach()
    log_ratio_T = ref_T - logprobs_T
    match estimator:
        case "k3":
            bounded_T = log_ratio_T.clamp(max=LOG_RATIO_BOUND)
            kl_T = torch.expm1(bounded_T) - bounded_T
            beyond_T = log_ratio_T > LOG_RATIO_BOUND
        case "k1":
            k1_T = -log_ratio_T.detach()
            slope_T = k1_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            kl_T = k1_T + slope_T * (logprobs_T - logprobs_T.detach())
            beyond_T = k1_T.abs() > LOG_RATIO_BOUND
        case _:
            raise ValueError(f"Unknown KL estimator {estimator!r}: use 'k1' or 'k3'.")
    loss = (weights_T.detach().float() * kl_T).sum()

    with torch.no_grad():
        gap_max, gap_argmax = _largest(_gap(logprobs_T, ref_T), active_T)
        metrics = {
            "kl_tokens": active_T.sum(),
            "kl_sum": kl_T.detach().sum(),
            "kl_bounded": beyond_T.sum(),
            "kl_gap_max": gap_max,
            "kl_gap_argmax": gap_argmax,
        }
    return loss, metrics


def nll_loss(logprobs_T: Float[Tensor, "T"], weights_T: Float[Tensor, "T"]) -> Float[Tensor, ""]:
    """The weighted negative log-likelihood: L_NLL of OG-MOPD with weights of 1 / abs(I)."""
    return -(weights_T.detach().float() * select(weights_T != 0, logprobs_T)).sum()


def locate_outliers(
    logprobs_T: Float[Tensor, "T"], other_T: Float[Tensor, "T"], threshold: float
) -> Int[Tensor, "N"]:
    """The positions, in order, of tokens whose two log-probs are more than ``threshold`` apart.

    A token that ``other_T`` has no log-prob for (NaN) is none; one that ``logprobs_T`` has none
    for always is. Pass trained tokens only: padding may hold anything.
    """
    near_T = (_gap(logprobs_T.detach().float(), other_T.detach().float()) <= threshold) | (
        other_T.isnan()
    )
    return (~near_T).nonzero().flatten()


def select(active_T: Bool[Tensor, "T"], values_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Single-precision values of the tokens that count; 0 for all others, whatever they hold."""
    return torch.where(active_T, values_T.float(), 0.0)


def _bounded_exp(log_ratio_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    return log_ratio_T.clamp(max=LOG_RATIO_BOUND).exp()


def _correction(
    raw_T: Float[Tensor, "T"], importance: Importance, cap: float, band: tuple[float, float]
) -> Float[Tensor, "T"]:
    match importance:
        case "none":
            return torch.ones_like(raw_T)
        case "truncated":
            return raw_T.clamp(max=cap)
        case "masked":
            return masked(raw_T, band)
        case _:
            raise ValueError(
                f"Unknown importance correction {importance!r}: use 'none', 'truncated' or "
                "'masked'."
            )


def _gap(one_T: Float[Tensor, "T"], other_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    # Two times -inf is no gap, though their difference is NaN.
    return torch.where(one_T == other_T, 0.0, (one_T - other_T).abs())


def _largest(
    values_T: Float[Tensor, "T"], among_T: Bool[Tensor, "T"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """The largest of non-negative values and where it is; (0, -1) among none."""
    if not len(values_T):
        return values_T.new_zeros(()), torch.full((), -1, device=values_T.device)
    largest, position = torch.where(among_T, values_T, -1.0).max(dim=0)
    return largest.clamp(min=0.0), torch.where(largest < 0, -1, position)
