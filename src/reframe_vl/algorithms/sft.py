"""Off-policy distillation: supervised fine-tuning on rollouts that earlier runs kept.

Tokens are learned by their negative log-likelihood, whoever sampled or wrote them. With rollouts of
specialists this is the off-policy counterpart of OG-MOPD. The step reads from top to bottom:

    groups -> spans to train -> token weights -> micro-batches    (prepare)
    log-probs -> negative log-likelihood                          (training_step)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from reframe_vl.algorithms.batching import BatchPlan, micro_batches
from reframe_vl.algorithms.losses import nll_loss
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.policy.score import score
from reframe_vl.types import (
    TRAINABLE,
    Context,
    MicroBatch,
    Provenance,
    Rollout,
    RolloutGroup,
)


def trainable(names: Iterable[str]) -> frozenset[Provenance]:
    """Provenances by their names.

    Raises:
        ValueError: There are none, or one of them can never be trained.
    """
    chosen = frozenset(names)
    if not chosen or not chosen <= TRAINABLE:
        raise ValueError(
            f"algorithm.settings.provenances is {sorted(chosen)}: name one or more of "
            f"{', '.join(sorted(TRAINABLE))}."
        )
    return frozenset(map(Provenance, chosen))


@dataclass(frozen=True)
class SFTSettings:
    """The loss.

    Attributes:
        provenances: Whose tokens are trained; those of others are only shown.
        weights: ``token``: all trained tokens of a step count alike; ``sequence``: all rollouts.
    """

    provenances: Sequence[str] = tuple(sorted(TRAINABLE))
    weights: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        trainable(self.provenances)
        if self.weights not in ("token", "sequence"):
            raise ValueError(
                f"algorithm.settings.weights is {self.weights!r}: give token or sequence."
            )


class SFT(PolicyModule):
    """Lifecycle of supervised fine-tuning; its mathematics is in ``losses``."""

    def __init__(self, settings: SFTSettings | None = None, **kwargs: Any) -> None:
        """Takes the loss's settings; the rest goes to :class:`PolicyModule`."""
        super().__init__(**kwargs)
        self.settings = settings or SFTSettings()
        self._trained = trainable(self.settings.provenances)

    @property
    def num_updates(self) -> int:
        """One: more updates are more steps, since nothing is sampled in between."""
        return 1

    @property
    def needs_reference(self) -> bool:
        """Nothing is compared with the initial policy."""
        return False

    @property
    def min_rollouts(self) -> int:
        """A rollout is learned by itself."""
        return 1

    def prepare(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """Micro-batches of one step."""
        for group in groups:
            for rollout in group.rollouts:
                # The gradient is that of an outcome which is always worth 1.
                rollout.advantage = 1.0
        return micro_batches(
            [replace(g, rollouts=list(map(self._to_train, g.rollouts))) for g in groups],
            # As the policy is used, however hot the rollouts were sampled. The limit of a turn
            # means nothing to tokens that are there already.
            self.components.sampling(temperature=1.0, max_new_tokens=1),
            BatchPlan(1, self.trainer.accumulate_grad_batches, self.settings.weights),
            self.step,
            self.ranks,
        )

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch, scaled so that the accumulated gradient is the step's."""
        items = batch.items
        if not items:
            return self.zero_loss()
        contexts = [item.context for item in items]
        scores = score(self.policy, contexts, batch.sampling, max_tokens=self.max_forward_tokens)
        weights_T = self.flat(items, "weights")
        loss = nll_loss(scores.logprobs_T, weights_T)
        self.gather_metrics(
            {
                "tokens": (weights_T != 0).sum(),
                "nll_sum": -scores.logprobs_T.sum(),
                "loss_sum": loss,
            }
        )
        return self.scaled(loss, batch)

    def _to_train(self, rollout: Rollout) -> Rollout:
        """The rollout with all that is to be trained in its contexts, and nothing else."""
        contexts = [
            Context(
                [
                    span if span.provenance in self._trained else replace(span, carried=True)
                    for span in context.spans
                ]
            )
            for context in (*rollout.contexts, *rollout.branches)
        ]
        return replace(rollout, contexts=[c for c in contexts if c.num_trained], branches=[])
