"""OG-MOPD (docs/method.md, 1.2): teachers guide a student on what it writes itself.

Where the gate is on, rollouts hold canonical calls in place of the student's poor ones; off, this
is plain multi-teacher on-policy distillation (MOPD). The step reads from top to bottom:

    groups -> weights of sampled and injected tokens -> teachers' log-probs   (prepare)
    log-probs -> distillation on sampled, likelihood of injected tokens       (training_step)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor

from reframe_vl.algorithms.advantages import Scale, group_advantages
from reframe_vl.algorithms.batching import (
    distillation_batches,
    keep_teacher_logprobs,
    sampling_of,
)
from reframe_vl.algorithms.distillation import (
    Divergence,
    distillation_loss,
    divergence_loss,
    domain_metrics,
    outside_band,
)
from reframe_vl.algorithms.losses import Metrics
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.algorithms.self_check import check_distillation, check_divergence
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.policy.divergence import teacher_divergence
from reframe_vl.policy.score import States, predictive_states, score, token_scores
from reframe_vl.policy.teachers import LocalTeacher, Teacher, Teachers
from reframe_vl.types import MicroBatch, RolloutGroup, TrainItem

_LOOKED_AT = 256
"""Samples whose domains are looked at before training: reading all of them may take long."""


@dataclass(frozen=True)
class DistillationSettings:
    """The loss; the numbers are our defaults.

    Attributes:
        divergence: ``sampled``: the teacher's opinion of the tokens that were drawn. ``full``: the
            reverse KL over the whole vocabulary; ``top_k``: over the student's likeliest tokens.
        top_k: For ``top_k``.
        eps_low: The smallest ratio of trainer to sampler at which a sampled token takes part.
        eps_high: The largest.
        injected_weight: Lambda_br, of the likelihood of injected tokens.
        outcome_weight: Alpha, of the group-relative outcome advantage that is added; 0 is none.
        scale: Whether outcome advantages are divided by the standard deviation.
        updates: U, optimiser updates of one step's rollouts.
        self_check: Prove on the first micro-batch that the loss is what it should be.
    """

    divergence: Divergence = "sampled"
    top_k: int = 32
    eps_low: float = 0.5
    eps_high: float = 2.0
    injected_weight: float = 1.0
    outcome_weight: float = 0.0
    scale: Scale = "std"
    updates: int = 1
    self_check: bool = True

    def __post_init__(self) -> None:
        if self.divergence not in ("sampled", "top_k", "full"):
            raise ValueError(f"Unknown divergence {self.divergence!r}: use sampled, top_k or full.")
        for name in ("top_k", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        for name in ("injected_weight", "outcome_weight"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}: it must be a finite number, 0 or more.")
        if not 0 <= self.eps_low <= 1 <= self.eps_high:
            raise ValueError(
                f"[eps_low, eps_high] is [{self.eps_low}, {self.eps_high}]: it must hold 1, the "
                "ratio on policy."
            )
        if self.outcome_weight and self.divergence != "sampled":
            raise ValueError(
                "outcome_weight adds to the advantage of sampled tokens: use divergence=sampled."
            )

    @property
    def band(self) -> tuple[float, float]:
        """Of the ratio of trainer to sampler."""
        return self.eps_low, self.eps_high


class OGMOPD(PolicyModule):
    """Lifecycle of OG-MOPD; its mathematics is in ``distillation``."""

    def __init__(
        self, teachers: Teachers, settings: DistillationSettings | None = None, **kwargs: Any
    ) -> None:
        """Takes teachers and the loss's settings; the rest goes to :class:`PolicyModule`."""
        super().__init__(**kwargs)
        self.teachers = teachers
        self.settings = settings or DistillationSettings()
        self._checked = not self.settings.self_check

    @property
    def num_updates(self) -> int:
        """U."""
        return self.settings.updates

    @property
    def needs_reference(self) -> bool:
        """The teachers take its place."""
        return False

    @property
    def min_rollouts(self) -> int:
        """A teacher judges a rollout by itself; only an outcome needs others to compare with."""
        return 2 if self.settings.outcome_weight else 1

    def check_start(self, data: SampleDataModule) -> None:
        """Looks at the teachers' folders, and that what is taught first has a teacher.

        Raises:
            FileNotFoundError: A teacher has no checkpoint.
            KeyError: A domain has no teacher.
            ValueError: A teacher does not fit the student or the settings.
        """
        self.teachers.check(
            self.components, {sample.domain for sample in data.coming_samples(_LOOKED_AT)}
        )
        self._check_heads()

    def setup(self, stage: str) -> None:
        """Loads the teachers."""
        super().setup(stage)
        if stage == "fit":
            self.teachers.load(self.components, self.max_forward_tokens)
            self._check_heads()
            self._check_ranks()

    def _check_heads(self) -> None:
        """Checks that the teachers' heads are there while backing up, where these are needed.

        Raises:
            ValueError: They would be gone.
        """
        if self.settings.divergence != "sampled" and not self.teachers.heads_stay:
            raise ValueError(
                f"divergence={self.settings.divergence} computes with the teachers' heads while "
                "backing up: set algorithm.teachers.offload=false (and where teachers are "
                "adapters, take some that leave the head alone), or use divergence=sampled."
            )

    def _check_ranks(self) -> None:
        """Checks that no teacher needs forwards of a student that runs in lockstep.

        Raises:
            ValueError: It would, between the student's own forward and backward pass.
        """
        strategy = self.trainer.strategy
        if (
            self.settings.divergence != "sampled"
            and isinstance(strategy, ModelParallelStrategy | DeepSpeedStrategy)
            and self.trainer.world_size > 1
            and self.teachers.hosted_by(self.policy)
        ):
            raise ValueError(
                f"divergence={self.settings.divergence} asks teachers between the student's "
                "forward and backward pass, and as adapters on the student they would run forwards "
                f"of it, which {type(strategy).__name__} does not bear: take strategy=ddp, "
                "algorithm.teachers.hosting=models, or divergence=sampled."
            )

    def prepare(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """Micro-batches of one step, with the teachers' log-probs where these are all it takes."""
        for group in groups:
            self.teachers.of(group.sample.domain)
            self._assign_advantages(group)
        settings = self.settings
        batches = distillation_batches(
            groups,
            sampling_of(groups),
            settings.updates,
            self.trainer.accumulate_grad_batches,
            settings.injected_weight,
            self.step,
            self.ranks,
        )
        if settings.divergence == "sampled":
            with self.scoring():
                self._ask_teachers(batches)
        return batches

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch, scaled so that the accumulated gradient is the step's."""
        items = batch.items
        if not items:
            alike = self.policy.lockstep is not None and self.settings.divergence != "sampled"
            return self._nothing(batch) if alike else self.zero_loss()
        loss, metrics = (
            self._sampled_loss(batch)
            if self.settings.divergence == "sampled"
            else self._divergence_loss(batch)
        )
        self.gather_metrics(metrics | {"loss_sum": loss.detach()})
        return self.scaled(loss, batch)

    # ------------------------------------------------------------------ the two forms

    def _sampled_loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        items, settings = batch.items, self.settings
        contexts = [item.context for item in items]
        scores = score(
            self.policy, contexts, batch.sampling, entropy=True, max_tokens=self.max_forward_tokens
        )
        sampler_T, injected_T = self.flat(items, "sampler_logprobs"), self.flat(items, "injected")
        inputs = {
            "teacher_T": self.flat(items, "teacher_logprobs"),
            "sampler_T": sampler_T,
            "injected_T": injected_T,
            "weights_T": self.flat(items, "weights"),
            "advantages_T": settings.outcome_weight * self.flat(items, "advantages"),
        }
        if not self._checked:
            check_distillation(contexts, scores.logprobs_T, inputs, settings.band)
            self._checked = True
        loss, metrics = distillation_loss(scores.logprobs_T, **inputs, band=settings.band)
        outside_T = outside_band(scores.logprobs_T, sampler_T, settings.band)
        gap_T = scores.logprobs_T - inputs["teacher_T"]
        metrics |= domain_metrics(gap_T, outside_T, injected_T, _of_tokens(items))
        if scores.entropy_T is not None:
            metrics["entropy_sum"] = scores.entropy_T[~injected_T].sum()
        self.report_outliers(batch, scores.logprobs_T, sampler_T)
        return loss, metrics

    def _divergence_loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        items = batch.items
        contexts = [item.context for item in items]
        states = predictive_states(self.policy, contexts, max_tokens=self.max_forward_tokens)
        kl_T = self._divergences(items, states, batch)
        logprobs_T, entropy_T = token_scores(
            self.policy, states.hidden_T, states.targets_T, batch.sampling, entropy=True
        )
        sampler_T, injected_T = self.flat(items, "sampler_logprobs"), self.flat(items, "injected")
        weights_T = self.flat(items, "weights")
        if not self._checked:
            check_divergence(contexts, logprobs_T, kl_T, injected_T, weights_T)
            self._checked = True
        loss, metrics = divergence_loss(kl_T, logprobs_T, injected_T, weights_T)
        # This form knows no band, and drops nothing.
        dropped_T = torch.zeros_like(injected_T)
        metrics |= domain_metrics(kl_T, dropped_T, injected_T, _of_tokens(items))
        metrics["entropy_sum"] = entropy_T[~injected_T].sum()
        self.report_outliers(batch, logprobs_T, sampler_T)
        return loss, metrics

    def _nothing(self, batch: MicroBatch) -> Tensor:
        """The same for a rank without items, in lockstep with those that have some."""
        states = predictive_states(self.policy, [])
        kl_T = self._divergences([], states, batch)
        logprobs_T, _ = token_scores(self.policy, states.hidden_T, states.targets_T, batch.sampling)
        return kl_T.sum() + logprobs_T.sum()

    def _divergences(
        self, items: Sequence[TrainItem], states: States, batch: MicroBatch
    ) -> Float[Tensor, "T"]:
        """Each token's divergence from its domain's teacher."""
        numbers = torch.arange(len(states.targets_T), device=self.device)
        places, nowhere = numbers.split(states.counts), numbers[:0]
        pieces: list[Tensor] = [states.hidden_T.new_zeros(0)]
        order: list[Tensor] = [nowhere]
        for domain in self._domains(items):
            teacher = self.teachers.of(domain)
            if not isinstance(teacher, LocalTeacher):
                raise TypeError(
                    f"The teacher of domain {domain} gives log-probs of given tokens only: use "
                    "divergence=sampled, or host it here."
                )
            chosen = [i for i, item in enumerate(items) if item.domain == domain]
            at = torch.cat([places[i] for i in chosen]) if chosen else nowhere
            with teacher.model() as model:
                theirs = predictive_states(
                    model, [items[i].context for i in chosen], max_tokens=self.max_forward_tokens
                )
            # Outside: the student's side has a gradient.
            kl_T = teacher_divergence(
                self.policy,
                model,
                states.hidden_T.index_select(0, at),
                theirs.hidden_T,
                batch.sampling,
                self.settings.top_k if self.settings.divergence == "top_k" else None,
            )
            if not kl_T.isfinite().all():
                odd_T = ~kl_T.detach().isfinite()
                with torch.no_grad():
                    if not model.head(theirs.hidden_T[odd_T]).isfinite().all():
                        raise self._not_finite(domain)
            pieces.append(kl_T)
            order.append(at)
        return torch.cat(pieces)[torch.cat(order).argsort()]

    # ------------------------------------------------------------------ before the updates

    def _ask_teachers(self, batches: Sequence[MicroBatch]) -> None:
        """One teacher after the other: each is brought in once a step."""
        items = [item for batch in batches for item in batch.items]
        by_teacher: dict[int, tuple[Teacher, list[TrainItem]]] = {}
        for domain in self._domains(items):
            teacher = self.teachers.of(domain)
            _, taught = by_teacher.setdefault(id(teacher), (teacher, []))
            taught += [item for item in items if item.domain == domain and not item.injected.all()]
        for item in items:
            # Injected tokens have no teacher: where there are no others, nobody is asked.
            item.teacher_logprobs = np.zeros(len(item.injected), np.float32)
        for teacher, taught in by_teacher.values():
            contexts = [item.context for item in taught]
            answers = teacher.log_probs(contexts, batches[0].sampling)
            for item, logprobs in zip(taught, answers, strict=True):
                if not np.isfinite(logprobs[~item.injected]).all():
                    raise self._not_finite(item.domain)
                item.teacher_logprobs = logprobs.astype(np.float32)
                keep_teacher_logprobs(item.context, item.teacher_logprobs)

    def _domains(self, items: Sequence[TrainItem]) -> list[str]:
        """The items' domains, or all ranks' where the student runs in lockstep."""
        domains = {item.domain for item in items}
        if self.policy.lockstep is not None:
            domains = set().union(*self.ranks.gather(domains))
        return sorted(domains)

    def _not_finite(self, domain: str) -> ValueError:
        name = self.teachers.routes[domain]
        return ValueError(
            f"Teacher {name} (teachers.{name}={self.teachers.paths[name]}) gives log-probs of "
            f"domain {domain} that are NaN or infinite: the student would learn nothing else. Its "
            "weights are damaged or overflow in their dtype: give another checkpoint, or "
            "algorithm.teachers.dtype=float32."
        )

    def _assign_advantages(self, group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            rollout.advantage = None
        if not self.settings.outcome_weight:
            return
        scored = [r for r in group.rollouts if r.reward is not None]
        rewards_G = torch.tensor([r.reward for r in scored], dtype=torch.float64)
        advantages_G = group_advantages(
            rewards_G, torch.ones(len(scored), dtype=torch.bool), scale=self.settings.scale
        )
        for rollout, advantage in zip(scored, advantages_G.tolist(), strict=True):
            rollout.advantage = advantage


def _of_tokens(items: Sequence[TrainItem]) -> list[str]:
    """The domain of each token."""
    return [item.domain for item in items for _ in range(len(item.weights))]
