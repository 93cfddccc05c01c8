"""Log-probabilities of trained tokens: the one function that scores policy, reference, teachers.

Plain form: one row a context, each image encoded once, logits only at trained positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reframe_vl.policy.inputs import ExpandedContext
from reframe_vl.policy.model import VisionLanguageModel, sampling_log_probs
from reframe_vl.types import Context, Sampling


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the trained tokens of several contexts, in the contexts' order.

    Attributes:
        logprobs_T: Of all contexts, one after the other.
        entropy_T: Of the distribution at each of these tokens; None unless asked for.
        counts: Trained tokens of each context.
    """

    logprobs_T: Float[Tensor, "T"]
    entropy_T: Float[Tensor, "T"] | None
    counts: list[int]

    def per_context(self) -> list[Float[Tensor, "t"]]:
        """The log-probabilities of each context by itself."""
        return list(self.logprobs_T.split(self.counts))


def score(
    model: VisionLanguageModel,
    contexts: Sequence[Context],
    sampling: Sampling,
    *,
    entropy: bool = False,
    max_padded_tokens: int = 16384,
    logits_chunk: int = 4096,
) -> Scores:
    """Scores the trained tokens of contexts under the distribution they were drawn from.

    Args:
        model: Any model of the family; gradients flow if the caller lets them.
        contexts: What the policy saw.
        sampling: Temperature and banned ids, applied as the sampler applied them.
        entropy: Also compute the entropy at each trained token.
        max_padded_tokens: A forward takes at most so many tokens, padding included (a single
            longer row goes alone).
        logits_chunk: Positions whose logits are held at once.

    Returns:
        Float32 scores; empty where nothing is trained.
    """
    rows = [model.expand(context) for context in contexts]
    counts = [len(row.trained) for row in rows]
    features = model.encode(
        [view for row, n in zip(rows, counts, strict=True) if n for _, view in row.blocks]
    )
    pieces: dict[int, tuple[Tensor, Tensor | None]] = {}
    for members in _bins([len(row.token_ids) for row in rows], counts, max_padded_tokens):
        batch = model.batch([rows[i] for i in members])
        hidden = model.hidden_states(batch, features)
        where, targets = _trained_positions([rows[i] for i in members], hidden.device)
        chosen = hidden[where[0], where[1]]
        logprobs, entropies = _token_scores(model, chosen, targets, sampling, entropy, logits_chunk)
        sizes = [counts[i] for i in members]
        split_entropy: Sequence[Tensor | None] = (
            [None] * len(sizes) if entropies is None else entropies.split(sizes)
        )
        for i, part, ent in zip(members, logprobs.split(sizes), split_entropy, strict=True):
            pieces[i] = (part, ent)
    order = sorted(pieces)
    if not order:
        empty = torch.zeros(0, device=model.device)
        return Scores(empty, empty.clone() if entropy else None, counts)
    return Scores(
        torch.cat([pieces[i][0] for i in order]),
        torch.cat([e for i in order if (e := pieces[i][1]) is not None]) if entropy else None,
        counts,
    )


def _bins(lengths: list[int], counts: list[int], max_padded_tokens: int) -> Iterator[list[int]]:
    """Rows with something to train, longest first, so that neighbours need little padding."""
    members: list[int] = []
    for i in sorted((i for i, n in enumerate(counts) if n), key=lambda i: -lengths[i]):
        # The first member is the longest: it sets the width.
        if members and lengths[members[0]] * (len(members) + 1) > max_padded_tokens:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


def _trained_positions(
    rows: list[ExpandedContext], device: torch.device
) -> tuple[Int[Tensor, "2 N"], Int[Tensor, "N"]]:
    """Where the hidden states that predict the trained tokens are, and those tokens."""
    row = np.concatenate([np.full(len(r.trained), i) for i, r in enumerate(rows)])
    column = np.concatenate([r.trained for r in rows])
    targets = np.concatenate([r.token_ids[r.trained] for r in rows])
    where = torch.from_numpy(np.stack([row, column - 1])).to(device)
    return where, torch.from_numpy(targets).to(device)


def _token_scores(
    model: VisionLanguageModel,
    hidden: Float[Tensor, "N hidden"],
    targets: Int[Tensor, "N"],
    sampling: Sampling,
    entropy: bool,
    chunk: int,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"] | None]:
    def piece(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        table = sampling_log_probs(model.head(states), sampling)
        picked = table.gather(-1, ids[:, None])[:, 0]
        if not entropy:
            return picked, picked.new_zeros(0)
        # Banned ids have no probability: their finite log-values must not enter the sum.
        probs = table.exp()
        if sampling.banned_ids:
            banned = torch.tensor(sampling.banned_ids, device=probs.device)
            probs = probs.index_fill(-1, banned, 0.0)
        return picked, -(probs * table).sum(-1)

    many = len(targets) > chunk
    results = [
        # A large vocabulary's logits outweigh everything else: recompute them when backing up.
        checkpoint(piece, h, t, use_reentrant=False)
        if many and torch.is_grad_enabled()
        else piece(h, t)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs = torch.cat([r[0] for r in results])
    return logprobs, torch.cat([r[1] for r in results]) if entropy else None
