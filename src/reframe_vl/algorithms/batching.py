"""From scored rollouts to micro-batches: weights, counts and balanced bins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32

from reframe_vl.algorithms.losses import WeightMode, token_weights
from reframe_vl.types import (
    Context,
    MicroBatch,
    Provenance,
    Rollout,
    RolloutGroup,
    Sampling,
    Span,
    TrainItem,
)

Counts = tuple[int, int]
"""Two counts of an optimiser step that are summed over ranks: (trained tokens, rollouts), or for
distillation (sampled tokens, injected tokens)."""
Bins = list[list[RolloutGroup]]
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a step, as one of them sees them.

    Attributes:
        number: This one's.
        gather: Brings the same small object of all ranks together.
    """

    number: int = 0
    gather: Callable[[Any], list[Any]] = lambda own: [own]

    def in_order(self, own: Sequence[T]) -> tuple[list[T], list[int]]:
        """What all ranks have, as if one had it all, and where this one's is.

        A step's samples are dealt to the ranks in turn.
        """
        everyone = self.gather(list(own))
        places = sorted((i, rank) for rank, one in enumerate(everyone) for i in range(len(one)))
        mine = [at for at, (_, rank) in enumerate(places) if rank == self.number]
        return [everyone[rank][i] for i, rank in places], mine

    def total(self, counts: list[Counts]) -> list[Counts]:
        """Adds counts up over the ranks."""
        return [
            (sum(first), sum(second))
            for first, second in (
                zip(*same, strict=True) for same in zip(*self.gather(counts), strict=True)
            )
        ]


ALONE = Ranks()


@dataclass(frozen=True)
class BatchPlan:
    """How a step's rollouts are split.

    Attributes:
        num_updates: U, optimiser updates of a step.
        num_micro: K, micro-batches of an update, the same on every rank.
        weight_mode: The loss's normaliser, see ``losses.token_weights``.
        max_tokens: For the constant normaliser: tokens that a rollout may have.
        skip_zero_advantage: Leave out contexts that only add zeros to the gradient. They stay in
            the normaliser.
    """

    num_updates: int
    num_micro: int
    weight_mode: WeightMode = "token"
    max_tokens: int | None = None
    skip_zero_advantage: bool = True


def micro_batches(
    groups: Sequence[RolloutGroup],
    sampling: Sampling,
    plan: BatchPlan,
    step: int,
    ranks: Ranks = ALONE,
) -> list[MicroBatch]:
    """Splits a step's rollouts into U times K micro-batches.

    A group stays together (its rollouts share a prefix), and updates and bins get about the same
    number of tokens. An update's micro-losses add up to the loss of one big batch over all ranks.

    Args:
        groups: With advantages; a rollout whose advantage is None takes no part, in numerator and
            normaliser alike.
        sampling: The distribution the tokens were drawn from.
        plan: How to split.
        step: The reinforcement-learning step.
        ranks: That have the other groups of the step.
    """
    updates = _updates(groups, plan.num_updates, plan.num_micro, _policy_gradient_contexts, ranks)
    counts = ranks.total([_count([g for part in update for g in part]) for update in updates])
    return [
        MicroBatch(
            _items(part, plan, total_tokens, num_rollouts), sampling, plan.num_micro, step, update
        )
        for update, ((total_tokens, num_rollouts), parts) in enumerate(
            zip(counts, updates, strict=True)
        )
        for part in parts
    ]


def sampling_of(groups: Sequence[RolloutGroup]) -> Sampling:
    """The distribution that a step's tokens were drawn from; any, for a rank that drew none."""
    return groups[0].rollouts[0].sampling if groups else Sampling()


def trained_rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """The rollouts that take part in the loss."""
    return [r for group in groups for r in group.rollouts if r.advantage is not None]


def num_trained(rollout: Rollout) -> int:
    """Trained tokens over all contexts of a rollout."""
    return sum(context.num_trained for context in rollout.contexts)


def scored_tokens(contexts: Sequence[Context]) -> int:
    """Tokens that scoring runs through: a beginning that contexts share counts once."""
    seen: set[int] = set()
    tokens = 0
    for context in contexts:
        path = 0
        for span in context.spans:
            path = hash((path, span.token_ids, tuple(view.hash for view in span.views)))
            if path not in seen:
                seen.add(path)
                tokens += len(span)
    return tokens


def _count(groups: Sequence[RolloutGroup]) -> Counts:
    lengths = [num_trained(rollout) for rollout in trained_rollouts(groups)]
    return sum(lengths), sum(length > 0 for length in lengths)


def distillation_batches(
    groups: Sequence[RolloutGroup],
    sampling: Sampling,
    num_updates: int,
    num_micro: int,
    injected_weight: float,
    step: int,
    ranks: Ranks = ALONE,
) -> list[MicroBatch]:
    """Splits a step's rollouts for OG-MOPD (docs/method.md, 1.2), as ``micro_batches`` does.

    Sampled tokens weigh 1 / abs(S), injected ones ``injected_weight`` / abs(I), counted over the
    whole optimiser step and all ranks; every rollout that was played takes part.

    Args:
        groups: Advantages are used where they are set, and 0 elsewhere.
        sampling: The distribution the tokens were drawn from.
        num_updates: U.
        num_micro: K.
        injected_weight: Lambda_br; at 0 injected tokens take no part.
        step: The reinforcement-learning step.
        ranks: That have the other groups of the step.
    """
    updates = _updates(groups, num_updates, num_micro, _distilled_contexts, ranks)
    items = [[_distillation_items(part) for part in update] for update in updates]
    flat = [np.concatenate([np.zeros(0, np.bool_), *_injected(update)]) for update in items]
    counts = ranks.total([(int((~mask).sum()), int(mask.sum())) for mask in flat])
    for (sampled, injected), update in zip(counts, items, strict=True):
        shares = (1 / max(sampled, 1), injected_weight / max(injected, 1))
        for item in (item for part in update for item in part):
            item.weights = np.where(item.injected, shares[1], shares[0]).astype(np.float32)
    return [
        MicroBatch(part, sampling, num_micro, step, number)
        for number, update in enumerate(items)
        for part in update
    ]


def tokens_of(context: Context, provenance: Provenance) -> npt.NDArray[np.bool_]:
    """Which of a context's trained tokens are of a provenance."""
    trained = [span for span in context.spans if span.trained]
    masks = [np.full(len(span.token_ids), span.provenance is provenance) for span in trained]
    return np.concatenate([np.zeros(0, np.bool_), *masks])


def _injected(update: Sequence[Sequence[TrainItem]]) -> list[npt.NDArray[np.bool_]]:
    return [item.injected for part in update for item in part]


def _distillation_items(groups: Sequence[RolloutGroup]) -> list[TrainItem]:
    items = []
    for group in groups:
        for rollout in filter(lambda r: r.played, group.rollouts):
            for context in (*rollout.contexts, *rollout.branches):
                count = context.num_trained
                if not count:
                    continue
                items.append(
                    TrainItem(
                        context,
                        advantages=np.full(count, rollout.advantage or 0.0, np.float32),
                        weights=np.zeros(count, np.float32),
                        sampler_logprobs=_sampler_logprobs(context.spans),
                        injected=tokens_of(context, Provenance.INJECTED),
                        domain=group.sample.domain,
                    )
                )
    return items


def keep_teacher_logprobs(context: Context, logprobs_T: Float32[np.ndarray, "T"]) -> None:
    """Puts a teacher's log-probs of the trained tokens into their spans, for the record."""
    start = 0
    for place, span in enumerate(context.spans):
        if span.trained:
            values = logprobs_T[start : start + len(span.token_ids)].tolist()
            context.spans[place] = replace(span, teacher_logprobs=tuple(values))
            start += len(values)


def _policy_gradient_contexts(group: RolloutGroup) -> list[Context]:
    return [c for r in trained_rollouts([group]) if r.advantage for c in r.contexts]


def _distilled_contexts(group: RolloutGroup) -> list[Context]:
    return [c for r in group.rollouts if r.played for c in (*r.contexts, *r.branches)]


def _updates(
    groups: Sequence[RolloutGroup],
    num_updates: int,
    num_micro: int,
    contexts: Callable[[RolloutGroup], list[Context]],
    ranks: Ranks,
) -> list[Bins]:
    """The groups of each update's micro-batches.

    Which update a group is in does not depend on how many ranks there are.
    """
    costs = [scored_tokens(contexts(group)) for group in groups]
    parts = [list(range(len(groups)))]
    if num_updates > 1:
        everyone, mine = ranks.in_order(costs)
        own = {at: i for i, at in enumerate(mine)}
        parts = [[own[at] for at in part if at in own] for part in _balance(everyone, num_updates)]
    return [
        [
            [groups[part[i]] for i in chosen]
            for chosen in _balance([costs[i] for i in part], num_micro)
        ]
        for part in parts
    ]


def _balance(costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Costliest first into the emptiest bin; numbers are in order inside a bin."""
    loads = [0] * num_bins
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        target = min(range(num_bins), key=lambda b: (loads[b], len(members[b])))
        loads[target] += costs[index]
        members[target].append(index)
    return [sorted(chosen) for chosen in members]


def _items(
    groups: Sequence[RolloutGroup], plan: BatchPlan, total_tokens: int, num_rollouts: int
) -> list[TrainItem]:
    rollouts = trained_rollouts(groups)
    if not rollouts:
        return []
    weights = token_weights(
        torch.tensor([num_trained(rollout) for rollout in rollouts]),
        num_rollouts,
        plan.weight_mode,
        total_tokens=total_tokens,
        max_tokens=plan.max_tokens,
    ).tolist()
    items = []
    for rollout, weight in zip(rollouts, weights, strict=True):
        if not rollout.advantage and plan.skip_zero_advantage:
            continue
        for context in rollout.contexts:
            count = context.num_trained
            if count:
                items.append(
                    TrainItem(
                        context,
                        advantages=np.full(count, rollout.advantage, np.float32),
                        weights=np.full(count, weight, np.float32),
                        sampler_logprobs=_sampler_logprobs(context.spans),
                    )
                )
    return items


def _sampler_logprobs(spans: Sequence[Span]) -> npt.NDArray[np.float32]:
    """One a trained token; NaN where the engine gave none or the policy did not sample."""
    values: list[float] = []
    for span in spans:
        if span.trained:
            logprobs = span.logprobs or (None,) * len(span.token_ids)
            values += [np.nan if value is None else value for value in logprobs]
    return np.asarray(values, np.float32)
