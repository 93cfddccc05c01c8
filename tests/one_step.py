"""Takes one optimiser step on fixed rollout groups and saves its gradient.

Run as a script, alone or under torch.distributed.run, so that ranks are real processes.
"""

import argparse
import dataclasses
import os
from functools import partial

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.algorithms.ogmopd import OGMOPD, DistillationSettings
from reframe_vl.policy.loading import Policy
from reframe_vl.policy.score import score
from reframe_vl.policy.sharding import full, gathered
from reframe_vl.policy.teachers import FrozenModel, Teachers
from reframe_vl.tools.codec import codec_for
from reframe_vl.types import (
    Answer,
    ImageMedia,
    Modality,
    Provenance,
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sample,
    Termination,
)
from tiny import random_context, sampling, tiny_model, tokenizer


class NoImage(ImageMedia):
    key, size = "none", (8, 8)

    def look(self, box, max_pixels):
        raise AssertionError("the rollouts are made by hand")


def fixed_groups(model, how, num_groups: int = 5, size: int = 4) -> list[RolloutGroup]:
    """Groups of unequal lengths, with drops, unscorable members and a dead group."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        sample = Sample(f"s{number}", Modality.IMAGE, NoImage(), "?", Answer("open", "x"))
        rollouts = []
        for index in range(size):
            contexts = [
                random_context(rng, model.view_maker, turns=int(rng.integers(1, 4)), lengths=(1, 9))
                for _ in range(1 + index % 2)
            ]
            rollout = Rollout(
                RolloutKey(0, 0, sample.id, index),
                contexts,
                how,
                Termination.ANSWERED,
                drop_assigned=bool(index % 2),
                reward=float(rng.normal()) if number != 1 else 1.0,
            )
            if number == 2 and index == 3:
                rollout.reward = None
            rollouts.append(rollout)
        groups.append(RolloutGroup(sample, rollouts))
    return groups


class Samples(LightningDataModule):
    def train_dataloader(self):
        return self.trainer.lightning_module.train_dataloader()

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class KeepGradient(Callback):
    """Keeps the last gradient, where there is one to see, and the weights at the end."""

    def __init__(self):
        self.gradients, self.weights = {}, {}

    def on_train_end(self, trainer, pl_module):
        self.weights = {name: tensor.clone() for name, tensor in gathered(pl_module.policy)}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients = {
            n: full(p.grad).clone()
            for n, p in pl_module.policy.named_parameters()
            if p.grad is not None
        }


def gradient(micro: int, settings: GRPOSettings | None = None) -> dict[str, torch.Tensor]:
    """The gradient of one update in ``micro`` micro-batches, over however many ranks there are."""
    policy = tiny_policy()
    module = GDGRPO(settings or GRPOSettings(), policy=policy, optimizer=SGD)
    return fit(module, fixed_groups(policy.model, sampling()), micro)


SGD = partial(torch.optim.SGD, lr=1.0)
TEACHERS = {"image": 1, "video": 2}
"""Seeds of the teachers by the domain they teach."""


def tiny_policy() -> Policy:
    return Policy(tiny_model("qwen3_vl"), tokenizer(), codec_for("qwen3_vl"), "tiny")


def distilled_groups(model, how) -> list[RolloutGroup]:
    """The fixed groups of two domains, with some turns injected and samplers that are a bit off."""
    rng = np.random.default_rng(3)
    groups = fixed_groups(model, how)
    for number, group in enumerate(groups):
        if number % 2:
            group.sample = dataclasses.replace(group.sample, domain="video")
        for rollout in group.rollouts:
            rollout.num_turns = 1
            for context in rollout.contexts:
                context.spans = [
                    dataclasses.replace(span, provenance=Provenance.INJECTED, logprobs=None)
                    if span.trained and rng.random() < 0.3
                    else span
                    for span in context.spans
                ]
            for context, piece in zip(
                rollout.contexts, score(model, rollout.contexts, how).per_context(), strict=True
            ):
                known = iter(piece.tolist())
                for at, span in enumerate(context.spans):
                    values = [next(known) for _ in span.token_ids] if span.trained else []
                    if span.provenance is Provenance.SAMPLED:
                        off = rng.normal(0, 0.5, len(values))
                        logprobs = tuple(float(v) for v in values + off)
                        context.spans[at] = dataclasses.replace(span, logprobs=logprobs)
    groups[0].rollouts[0].termination = Termination.ERROR
    return groups


def distilled_gradient(
    micro: int, settings: DistillationSettings | None = None
) -> dict[str, torch.Tensor]:
    """The same for distillation from two teachers."""
    policy = tiny_policy()
    teachers = Teachers({"a": "unused", "b": "unused"}, {"image": "a", "video": "b"})
    for name, seed in zip("ab", TEACHERS.values(), strict=True):
        frozen = tiny_model("qwen3_vl", seed=seed).requires_grad_(False)
        teachers.add(name, FrozenModel(frozen, policy.model))
    module = OGMOPD(teachers, settings or DistillationSettings(), policy=policy, optimizer=SGD)
    with torch.no_grad():
        groups = distilled_groups(policy.model, sampling())
    return fit(module, groups, micro)


def dealt(groups: list[RolloutGroup], rank: int, ranks: int) -> list[RolloutGroup]:
    """A rank's share, as samples are dealt."""
    return groups[rank::ranks]


def fit(
    module, groups: list[RolloutGroup], micro: int, strategy="ddp", share=dealt, **trainer_settings
) -> dict[str, torch.Tensor]:
    return kept(module, groups, micro, strategy, share, **trainer_settings).gradients


def kept(
    module, groups: list[RolloutGroup], micro: int, strategy="ddp", share=dealt, **trainer_settings
) -> KeepGradient:
    keep = KeepGradient()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy if ranks > 1 else "auto",
        max_epochs=1,
        accumulate_grad_batches=micro,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep],
        **trainer_settings,
    )
    module.loader.generate = lambda: share(groups, trainer.global_rank, trainer.world_size)
    trainer.fit(module, datamodule=Samples())
    return keep


def assert_same(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-3
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance * scale, name


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--distil", action="store_true")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = (distilled_gradient if args.distil else gradient)(args.micro)
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(result, args.out)
