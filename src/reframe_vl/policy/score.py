"""Log-probabilities of trained tokens: the one function that scores policy, reference, teachers.

Each image is encoded once, each shared prefix runs once, and logits are computed only at trained
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reframe_vl.policy.forest import MIN_SHARED, plant
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
    states = predictive_states(
        model, contexts, share_prefixes=share_prefixes, max_tokens=max_tokens
    )
    logprobs_T, entropy_T = token_scores(
        model, states.hidden_T, states.targets_T, sampling, entropy, logits_chunk
    )
    return Scores(logprobs_T, entropy_T if entropy else None, states.counts)


# ------------------------------------------------------------------ states that predict


@dataclass(frozen=True)
class States:
    """What the decoder gives before each trained token of several contexts, in their order.

    Attributes:
        hidden_T: Hidden states, from which the head predicts the tokens.
        targets_T: The trained tokens.
        counts: Trained tokens of each context.
    """

    hidden_T: Float[Tensor, "T hidden"]
    targets_T: Int[Tensor, "T"]
    counts: list[int]


def predictive_states(
    model: VisionLanguageModel,
    contexts: Sequence[Context],
    *,
    share_prefixes: bool = True,
    max_tokens: int = 16384,
) -> States:
    """Runs the decoder on contexts; see ``score`` for what the arguments mean."""
    rows = [model.expand(context) for context in contexts]
    counts = [len(row.trained) for row in rows]
    used = [i for i, count in enumerate(counts) if count]
    lockstep = model.lockstep
    if not used and lockstep is None:
        embedding = model.language_model.get_input_embeddings().weight  # type: ignore[operator]
        nothing = torch.zeros(0, dtype=torch.long, device=embedding.device)
        return States(embedding.new_zeros(0, embedding.shape[1]), nothing, counts)
    shown = list(used)
    if lockstep is not None:
        shown.append(len(rows))
        rows.append(model.expand(lockstep.filler))
    features = model.encode([view for i in shown for _, view in rows[i].blocks])
    shared = share_prefixes and model.shares_prefixes
    states = _forest_states if shared else _row_states
    bins = list((_neighbours if shared else _padded)(rows, used, max_tokens))
    if lockstep is not None:
        bins = lockstep.even(bins, shown[-1], model.device)
    # Layers that are computed again keep little already: a third forward would buy nothing.
    again = len(bins) > 1 and torch.is_grad_enabled() and not model.recomputes_layers
    pieces: dict[int, Tensor] = {}
    fillers: list[Tensor] = []
    for members in bins:
        chosen = [rows[i] for i in members]
        hidden = (
            checkpoint(states, model, chosen, features, use_reentrant=False)
            if again
            else states(model, chosen, features)
        )
        sizes = [len(row.trained) for row in chosen]
        pieces |= dict(zip(members, hidden.split(sizes), strict=True))
        if lockstep is not None:
            fillers.append(pieces[shown[-1]])
    targets = np.concatenate(
        [np.zeros(0, np.int64), *(rows[i].token_ids[rows[i].trained] for i in used)]
    )
    hidden_T = torch.cat([*(piece[:0] for piece in fillers), *(pieces[i] for i in used)])
    return States(hidden_T, torch.from_numpy(targets).to(hidden_T.device), counts)


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
    """Contexts in order, cut where what they share with none of the two before is too much.

    Two, since a rollout that lost its original input has a context before the drop and one after.
    """
    if used and sum(len(rows[i].token_ids) for i in used) <= max_tokens:
        yield list(used)
        return
    members: list[int] = []
    total = 0
    for i in used:
        length = len(rows[i].token_ids)
        shared = max((rows[i].shared_with(rows[m]) for m in members[-2:]), default=0)
        # Shorter runs are packed with every context.
        new = length - (shared if shared >= MIN_SHARED else 0)
        if members and total + new > max_tokens:
            yield members
            members, total, new = [], 0, length
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


def token_scores(
    model: VisionLanguageModel,
    hidden_T: Float[Tensor, "T hidden"],
    targets_T: Int[Tensor, "T"],
    sampling: Sampling,
    entropy: bool = False,
    logits_chunk: int = 4096,
) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
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

    results = in_chunks(model, piece, logits_chunk, hidden_T, targets_T)
    return results[0], results[1]


def in_chunks(
    model: VisionLanguageModel,
    function: Callable[..., tuple[Tensor, ...]],
    size: int,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Applies a function of a model's head to pieces of tensors, and puts its results together.

    A large vocabulary's logits outweigh everything else: where there are several pieces, each is
    computed again when backing up. In lockstep all ranks have as many as the one with the most,
    some of them empty: the head may be gathered each time that it runs.
    """
    pieces = list(zip(*(tensor.split(size) for tensor in tensors), strict=True))
    if model.lockstep is not None:
        missing = model.lockstep.most(len(pieces), tensors[0].device) - len(pieces)
        pieces += [tuple(tensor[:0] for tensor in tensors)] * missing
    recompute = len(pieces) > 1 and torch.is_grad_enabled()
    results = [
        checkpoint(function, *piece, use_reentrant=False) if recompute else function(*piece)
        for piece in pieces
    ]
    return tuple(torch.cat(same) for same in zip(*results, strict=True))
