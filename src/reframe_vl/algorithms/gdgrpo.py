"""GD-GRPO (docs/method.md, 1.1): group-relative optimisation, advantages in drop subgroups.

With ``subgroups=False``, no drop and a reward of answer and validity alone it is outcome-based
GRPO, the baseline. The step reads from top to bottom:

    groups -> advantages (-> selection) -> token weights -> micro-batches        (prepare)
    log-probs -> clipped surrogate (+ KL)                                        (training_step)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reframe_vl.algorithms.advantages import (
    Scale,
    drop_subgroup_advantages,
    group_advantages,
)
from reframe_vl.algorithms.batching import BatchPlan, micro_batches, sampling_of, tokens_of
from reframe_vl.algorithms.losses import (
    Importance,
    KLEstimator,
    WeightMode,
    kl_penalty,
    policy_gradient_loss,
)
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.algorithms.selection import Selection, overran
from reframe_vl.policy.score import score
from reframe_vl.types import MicroBatch, Provenance, RolloutGroup, TrainItem


@dataclass(frozen=True)
class GRPOSettings:
    """The loss.

    Attributes:
        subgroups: Advantages within the drop subgroups; off: over the whole group.
        scale: Whether advantages are divided by the standard deviation.
        advantage_eps: Added to the standard deviation.
        weights: The loss's normaliser.
        max_tokens: For ``weights=constant``.
        clip_low: PPO's clip below 1.
        clip_high: PPO's clip above 1.
        kl_coef: Weight of the KL penalty to the initial policy; 0 needs no reference.
        kl_estimator: k1 or k3.
        importance: Correction for the sampler's distribution; ``auto`` is off where the engine is
            the trainer itself, else ``truncated``.
        importance_cap: For ``truncated``.
        importance_band: For ``masked``.
        updates: U, optimiser updates of one step's rollouts.
        entropy: Also log the policy's entropy at trained tokens.
        selection: Train some of a step's groups only (PyVision-RL); None trains all.
    """

    subgroups: bool = True
    scale: Scale = "std"
    advantage_eps: float = 1e-4
    weights: WeightMode = "token"
    max_tokens: int | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    importance: Importance | str = "auto"
    importance_cap: float = 2.0
    importance_band: tuple[float, float] = (0.5, 2.0)
    updates: int = 1
    entropy: bool = True
    selection: Selection | None = None

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"updates is {self.updates}: it must be at least 1.")
        for name in ("clip_low", "clip_high", "kl_coef", "advantage_eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more.")
        if self.weights == "constant" and not self.max_tokens:
            raise ValueError("weights=constant divides by max_tokens: set it to 1 or more.")


class GDGRPO(PolicyModule):
    """Lifecycle of GD-GRPO; its mathematics is in ``advantages`` and ``losses``."""

    def __init__(self, settings: GRPOSettings | None = None, **kwargs: Any) -> None:
        """Takes the loss's settings; the rest goes to :class:`PolicyModule`."""
        super().__init__(**kwargs)
        self.settings = settings or GRPOSettings()
        self._selected: dict[str, float] = {}

    @property
    def num_updates(self) -> int:
        """U."""
        return self.settings.updates

    @property
    def needs_reference(self) -> bool:
        """Whether the initial policy is kept."""
        return self.settings.kl_coef > 0

    def prepare(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """Advantages and micro-batches of one step."""
        for group in groups:
            self._assign_advantages(group)
        if self.settings.selection:
            self._selected = self.settings.selection.apply(groups, self.ranks)
        sampling = sampling_of(groups)
        plan = BatchPlan(
            self.num_updates,
            self.trainer.accumulate_grad_batches,
            self.settings.weights,
            self.settings.max_tokens,
            # A zero advantage still pulls towards the reference where there is one.
            skip_zero_advantage=not self.needs_reference,
        )
        batches = micro_batches(groups, sampling, plan, self.step, self.ranks)
        if self.num_updates > 1 or self.needs_reference:
            with self.scoring():
                self._score_before_updates(batches)
        return batches

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch, scaled so that the accumulated gradient is the step's."""
        settings, items = self.settings, batch.items
        if not items:
            return self.zero_loss()
        scores = score(
            self.policy,
            [item.context for item in items],
            batch.sampling,
            entropy=settings.entropy,
            max_tokens=self.max_forward_tokens,
        )
        weights_T = self.flat(items, "weights")
        loss, metrics = policy_gradient_loss(
            scores.logprobs_T,
            self.flat(items, "old_logprobs") if self.num_updates > 1 else None,
            self.flat(items, "sampler_logprobs"),
            self.flat(items, "advantages"),
            weights_T,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            importance=self.importance(settings.importance),
            importance_cap=settings.importance_cap,
            importance_band=settings.importance_band,
        )
        if self.needs_reference:
            sampled = [tokens_of(item.context, Provenance.SAMPLED) for item in items]
            sampled_T = torch.from_numpy(np.concatenate(sampled)).to(self.device)
            penalty, kl_metrics = kl_penalty(
                scores.logprobs_T,
                self.flat(items, "ref_logprobs"),
                torch.where(sampled_T, weights_T, 0.0),
                estimator=settings.kl_estimator,
            )
            loss = loss + settings.kl_coef * penalty
            metrics |= kl_metrics
        self.report_outliers(batch, scores.logprobs_T, self.flat(items, "sampler_logprobs"))
        metrics["loss_sum"] = loss.detach()
        if scores.entropy_T is not None:
            metrics["entropy_sum"] = scores.entropy_T.detach().sum()
        self.gather_metrics(metrics)
        return self.scaled(loss, batch)

    def compared(self, group: RolloutGroup) -> list[bool]:
        """Which rollouts of a group are compared with each other, and trained."""
        selects = self.settings.selection is not None
        return [r.reward is not None and not (selects and overran(r)) for r in group.rollouts]

    def _assign_advantages(self, group: RolloutGroup) -> None:
        rollouts = group.rollouts
        rewards_G = torch.tensor([r.reward if r.reward is not None else 0.0 for r in rollouts])
        settings = self.settings
        scorable = self.compared(group)
        scorable_G = torch.tensor(scorable)
        if settings.subgroups:
            dropped_G = torch.tensor([r.drop_assigned for r in rollouts])
            advantages_G = drop_subgroup_advantages(
                rewards_G,
                dropped_G,
                scorable_G,
                scale=settings.scale,
                eps=settings.advantage_eps,
            )
        else:
            advantages_G = group_advantages(
                rewards_G, scorable_G, scale=settings.scale, eps=settings.advantage_eps
            )
        for rollout, known, advantage in zip(
            rollouts, scorable, advantages_G.tolist(), strict=True
        ):
            rollout.advantage = advantage if known else None

    def on_train_epoch_end(self) -> None:
        """Logs the step's metrics, and what was selected."""
        self.log_step({f"selection/{name}": value for name, value in self._selected.items()})
        super().on_train_epoch_end()

    def _score_before_updates(self, batches: list[MicroBatch]) -> None:
        if self.num_updates > 1:
            for batch in batches:
                self._keep(batch.items, "old_logprobs", self.policy, batch)
        if self.needs_reference:
            with self.reference_policy() as reference:
                for batch in batches:
                    self._keep(batch.items, "ref_logprobs", reference, batch)

    def _keep(self, items: list[TrainItem], name: str, model: Any, batch: MicroBatch) -> None:
        scores = score(
            model,
            [item.context for item in items],
            batch.sampling,
            max_tokens=self.max_forward_tokens,
        )
        for item, logprobs in zip(items, scores.per_context(), strict=True):
            setattr(item, name, logprobs.cpu().numpy())
