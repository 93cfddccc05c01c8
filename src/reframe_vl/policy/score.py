"""Log-probabilities of trained tokens: the one function that scores policy, reference, teachers.

Each image is encoded once, each shared prefix runs once, and logits are computed only at trained
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reframe_vl.policy.forest import plant
from reframe_vl.policy.inputs import ExpandedContext
from reframe_vl.policy.model import VisionLanguageModel, VisualFeatures, sampling_log_probs
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
    share_prefixes: bool = True,
    max_tokens: int = 16384,
    logits_chunk: int = 4096,
) -> Scores:
    """Scores the trained tokens of contexts under the distribution they were drawn from.

    Args:
        model: Any model of the family; gradients flow if the caller lets them.
        contexts: What the policy saw; those that share a prefix should be neighbours.
        sampling: Temperature and banned ids, applied as the sampler applied them.
        entropy: Also compute the entropy at each trained token.
        share_prefixes: Run each shared prefix once; off, one padded row a context.
        max_tokens: A forward takes at most so many tokens (a longer context goes alone). Where
            several are needed, each is computed again when backing up, so that memory holds the
            intermediate results of one at a time.
        logits_chunk: Positions whose logits are held at once.

    Returns:
        Float32 scores; empty where nothing is trained.
    """
    rows = [model.expand(context) for context in contexts]
    counts = [len(row.trained) for row in rows]
    used = [i for i, count in enumerate(counts) if count]
    features = model.encode([view for i in used for _, view in rows[i].blocks])
    shared = share_prefixes and model.shares_prefixes
    bins = list((_neighbours if shared else _padded)(rows, used, max_tokens))
    # Layers that are computed again keep little already: a third forward would buy nothing.
    again = len(bins) > 1 and torch.is_grad_enabled() and not model.recomputes_layers
    pieces: dict[int, tuple[Tensor, Tensor]] = {}
    for members in bins:
        chosen = [rows[i] for i in members]
        states = _forest_states if shared else _row_states
        hidden = (
            checkpoint(states, model, chosen, features, use_reentrant=False)
            if again
            else states(model, chosen, features)
        )
        targets = np.concatenate([row.token_ids[row.trained] for row in chosen])
        logprobs, entropies = _token_scores(
            model,
            hidden,
            torch.from_numpy(targets).to(hidden.device),
            sampling,
            entropy,
            logits_chunk,
        )
        sizes = [counts[i] for i in members]
        parts = zip(logprobs.split(sizes), entropies.split(sizes), strict=True)
        pieces |= dict(zip(members, parts, strict=True))
    empty = torch.zeros(0, device=model.device)
    return Scores(
        torch.cat([pieces[i][0] for i in used]) if used else empty,
        (torch.cat([pieces[i][1] for i in used]) if used else empty) if entropy else None,
        counts,
    )


# ------------------------------------------------------------------ states that predict


def _forest_states(
    model: VisionLanguageModel, rows: Sequence[ExpandedContext], features: VisualFeatures | None
) -> Float[Tensor, "N hidden"]:
    """Hidden states before the trained tokens, each shared prefix computed once."""
    forest = plant(rows)
    states = model.forest_states(forest, features)
    before = [where[row.trained - 1] for row, where in zip(rows, forest.where, strict=True)]
    return states.index_select(0, torch.from_numpy(np.concatenate(before)).to(states.device))


def _row_states(
    model: VisionLanguageModel, rows: Sequence[ExpandedContext], features: VisualFeatures | None
) -> Float[Tensor, "N hidden"]:
    """The same from one padded row a context."""
    states = model.hidden_states(model.batch(rows), features)
    index = np.concatenate([np.full(len(row.trained), i) for i, row in enumerate(rows)])
    before = np.concatenate([row.trained - 1 for row in rows])
    where = torch.from_numpy(np.stack([index, before])).to(states.device)
    return states[where[0], where[1]]


def _neighbours(
    rows: Sequence[ExpandedContext], used: Sequence[int], max_tokens: int
) -> Iterator[list[int]]:
    """Contexts in order, cut where what they do not share with the one before is too much."""
    members: list[int] = []
    total = 0
    for i in used:
        ids = rows[i].token_ids
        new = len(ids)
        if members:
            last = rows[members[-1]].token_ids
            both = min(len(ids), len(last))
            differs = np.flatnonzero(ids[:both] != last[:both])
            new -= int(differs[0]) if len(differs) else both
        if members and total + new > max_tokens:
            yield members
            members, total, new = [], 0, len(ids)
        members.append(i)
        total += new
    if members:
        yield members


def _padded(
    rows: Sequence[ExpandedContext], used: Sequence[int], max_tokens: int
) -> Iterator[list[int]]:
    """Longest first, so that neighbours need little padding."""
    members: list[int] = []
    for i in sorted(used, key=lambda i: -len(rows[i].token_ids)):
        # The first member is the longest: it sets the width.
        if members and len(rows[members[0]].token_ids) * (len(members) + 1) > max_tokens:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


# ------------------------------------------------------------------ logits


def _token_scores(
    model: VisionLanguageModel,
    hidden: Float[Tensor, "N hidden"],
    targets: Int[Tensor, "N"],
    sampling: Sampling,
    entropy: bool,
    chunk: int,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Log-probabilities, and entropies (zeros unless asked for), a chunk at a time."""

    def piece(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        table = sampling_log_probs(model.head(states), sampling)
        picked = table.gather(-1, ids[:, None])[:, 0]
        if not entropy:
            return picked, picked.new_zeros(len(ids))
        with torch.no_grad():
            # Banned ids have no probability: their finite log-values must not enter the sum.
            probs = table.exp()
            if sampling.banned_ids:
                banned = torch.tensor(sampling.banned_ids, device=probs.device)
                probs = probs.index_fill(-1, banned, 0.0)
            entropies = -(probs * table).sum(-1)
        return picked, entropies

    # A large vocabulary's logits outweigh everything else: recompute them when backing up.
    recompute = len(targets) > chunk and torch.is_grad_enabled()
    results = [
        checkpoint(piece, h, t, use_reentrant=False) if recompute else piece(h, t)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])
