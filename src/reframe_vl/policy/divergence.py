"""How far two distributions over the next token are apart.

Reverse KL of a policy from a teacher is taken over the whole vocabulary or its largest part: the
sampled form of on-policy distillation looks at one token a position. Here the expectation over
the policy's next token is taken exactly: more work and less noise, with the same mean gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from reframe_vl.policy.model import VisionLanguageModel, sampling_log_probs
from reframe_vl.policy.score import in_chunks
from reframe_vl.types import Sampling


def reverse_kl(
    student_NV: Float[Tensor, "N V"], teacher_NV: Float[Tensor, "N V"], top_k: int | None = None
) -> Float[Tensor, "N"]:
    """``KL(student || teacher)`` of log-probabilities; the gradient flows through the student's.

    Args:
        student_NV: Log-probabilities; -inf where the token cannot be drawn.
        teacher_NV: Likewise, over the same tokens.
        top_k: Tell only the student's k likeliest tokens apart and put all others into one class.
            A lower bound of the divergence, which it reaches where k is V.
    """
    teacher_NV = teacher_NV.detach()
    if top_k is not None and top_k < student_NV.shape[1]:
        chosen = student_NV.detach().topk(top_k, dim=-1).indices
        student_NV = _with_rest(student_NV.gather(-1, chosen))
        teacher_NV = _with_rest(teacher_NV.gather(-1, chosen))
    drawn_NV = student_NV > float("-inf")
    # 0 times infinity is NaN: what cannot be drawn is left out before any arithmetic.
    student_NV = torch.where(drawn_NV, student_NV, 0.0)
    gap_NV = student_NV - torch.where(drawn_NV, teacher_NV, 0.0)
    return torch.where(drawn_NV, student_NV.exp() * gap_NV, 0.0).sum(-1)


def _with_rest(logprobs_NK: Float[Tensor, "N K"]) -> Float[Tensor, "N K1"]:
    """Adds the log-probability of everything else, which rounding may not make negative."""
    rest_N = torch.log1p(-logprobs_NK.exp().sum(-1).clamp(max=1 - 1e-6))
    return torch.cat([logprobs_NK, rest_N[:, None]], -1)


def teacher_divergence(
    student: VisionLanguageModel,
    teacher: VisionLanguageModel,
    student_hidden_T: Float[Tensor, "T hidden"],
    teacher_hidden_T: Float[Tensor, "T other"],
    sampling: Sampling,
    top_k: int | None = None,
    logits_chunk: int = 1024,
) -> Float[Tensor, "T"]:
    """``reverse_kl`` at positions whose hidden states are at hand, a chunk of logits at a time.

    Both distributions are those that tokens are drawn from. Rows of a padded vocabulary that only
    one of the two models has are left out: nothing can be drawn there.
    """

    def allowed(model: VisionLanguageModel, hidden: Tensor, size: int) -> Tensor:
        banned = [i for i in sampling.banned_ids if i < size]
        logits = model.head(hidden)[:, :size]
        table = sampling_log_probs(logits, Sampling(sampling.temperature, banned_ids=tuple(banned)))
        ids = torch.tensor(banned, dtype=torch.long, device=table.device)
        return table.index_fill(-1, ids, float("-inf"))

    def piece(mine: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        size = min(model.vocab_size for model in (student, teacher))
        with torch.no_grad():
            teacher_NV = allowed(teacher, other, size)
        return (reverse_kl(allowed(student, mine, size), teacher_NV, top_k),)

    return in_chunks(student, piece, logits_chunk, student_hidden_T, teacher_hidden_T)[0]


def mean_gap(ours_T: Float[np.ndarray, "T"], theirs_T: Float[np.ndarray, "T"]) -> float:
    """``mean |log p - log q|`` of the same tokens, by two programs, in nats.

    Args:
        ours_T: Log-probs. Has to be numbers: the mean is NaN where any that is compared is none.
        theirs_T: Log-probs; NaN where the other gave none, and there is nothing to compare.
    """
    given_T = ~np.isnan(theirs_T)
    return float(np.abs(ours_T - theirs_T)[given_T].mean()) if given_T.any() else float("nan")
