"""One optimiser step of many kinds, each of which two ranks take as one process does.

Run as a script under torch.distributed.run it takes them all, and saves the gradients.
"""

import argparse
import copy
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from one_step import SGD, dealt, distilled_groups, fixed_groups, kept
from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.algorithms.ogmopd import OGMOPD, DistillationSettings
from reframe_vl.algorithms.selection import Selection
from reframe_vl.policy import divergence, score
from reframe_vl.policy.loading import LoRASettings, Policy, with_adapters
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import in_chunks
from reframe_vl.policy.teachers import Adapter, FrozenModel, Teachers
from reframe_vl.policy.visual_cache import VisualCache
from reframe_vl.strategies import FSDP2
from reframe_vl.tools.codec import codec_for
from reframe_vl.types import Provenance, Span
from tiny import sampling, tiny_model, tokenizer, view_maker


def zero(stage):
    from zero_on_cpus import ZeROOnCPUs

    return ZeROOnCPUs(stage)


STRATEGIES = {
    "ddp": lambda: "ddp",
    "fsdp2": FSDP2,
    "deepspeed_zero2": lambda: zero(2),
    "deepspeed_zero3": lambda: zero(3),
}


def all_to_the_first(groups, rank, ranks):
    return groups if rank == 0 else []


def text_to_the_second(groups, rank, ranks):
    """The first rank has all groups but one, of which the images are taken away."""
    return [g for i, g in enumerate(groups) if (i == 0) == (rank == 1)] if ranks > 1 else groups


@dataclass(frozen=True)
class Case:
    """A kind of step; ``share`` says which rank has which groups."""

    micro: int = 1
    family: str = "qwen3_vl"
    settings: GRPOSettings = field(default_factory=GRPOSettings)
    distilled: DistillationSettings | None = None
    lora: bool = False
    frozen_vision: bool = False
    max_forward_tokens: int = 16384
    logits_chunk: int | None = None
    checkpointing: bool = False
    half: bool = False
    share: Any = dealt
    clip: float | None = None


CASES = {
    "plain": Case(),
    "micro": Case(micro=3),
    "nothing for the second": Case(micro=2, share=all_to_the_first),
    "no images for the second": Case(share=text_to_the_second),
    "several forwards": Case(max_forward_tokens=48),
    "recomputed layers": Case(max_forward_tokens=48, checkpointing=True),
    "two updates and a reference": Case(settings=GRPOSettings(updates=2, kl_coef=0.5)),
    "reference for the second": Case(
        settings=GRPOSettings(kl_coef=0.5), share=all_to_the_first, max_forward_tokens=48
    ),
    "selection": Case(settings=GRPOSettings(selection=Selection(3), subgroups=False)),
    "qwen3_5": Case(micro=2, family="qwen3_5"),
    "frozen vision": Case(frozen_vision=True, share=text_to_the_second),
    "adapters": Case(micro=2, lora=True, frozen_vision=True),
    "adapters and a reference": Case(
        lora=True, frozen_vision=True, settings=GRPOSettings(kl_coef=0.5)
    ),
    "distillation": Case(micro=2, distilled=DistillationSettings()),
    "distillation, whole vocabulary": Case(micro=2, distilled=DistillationSettings("full")),
    # Domains differ from rank to rank, and so do the teachers that a rank asks.
    "distillation, adapters as teachers": Case(
        lora=True, frozen_vision=True, distilled=DistillationSettings()
    ),
    "distillation, nothing for the second": Case(
        micro=2,
        lora=True,
        frozen_vision=True,
        distilled=DistillationSettings(),
        max_forward_tokens=192,
        share=all_to_the_first,
    ),
    "several pieces of logits": Case(logits_chunk=16),
    "distillation, several pieces of logits": Case(
        micro=2,
        distilled=DistillationSettings("full"),
        logits_chunk=16,
        share=all_to_the_first,
    ),
    # The norm is 1.2. What is left is read from the weights, so it must be large beside their
    # rounding.
    "clipped": Case(micro=2, clip=0.5),
}

HALF_CASES = {
    "half precision": Case(micro=2, half=True, settings=GRPOSettings(kl_coef=0.5)),
    "half precision, frozen vision": Case(half=True, frozen_vision=True, share=text_to_the_second),
    "half precision, qwen3_5": Case(half=True, family="qwen3_5", checkpointing=True),
    "half precision, adapters": Case(micro=2, half=True, lora=True, frozen_vision=True),
}


def policy_of(case: Case) -> Policy:
    model = tiny_model(case.family)
    if case.half:
        model.dtype = torch.bfloat16
        model.narrow()
    if case.lora:
        torch.manual_seed(5)
        adapted = with_adapters(model.base, LoRASettings(rank=4))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        model = VisionLanguageModel(adapted.train(), view_maker(), VisualCache(64))
    if case.frozen_vision:
        model.visual.requires_grad_(False)
    if case.checkpointing:
        model.base.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model, tokenizer(), codec_for(case.family), "tiny")


def teachers_of(case: Case, policy: Policy) -> Teachers:
    """Two models of their own; of a student with an adapter, two more adapters."""
    teachers = Teachers({"a": "unused", "b": "unused"}, {"image": "a", "video": "b"})
    student = policy.model
    for name, seed in zip("ab", (1, 2), strict=True):
        if not case.lora:
            frozen = tiny_model(case.family, seed=seed).requires_grad_(False)
            teachers.add(name, FrozenModel(frozen, student))
            continue
        own = f"teacher_{name}"
        student.model.add_adapter(own, copy.deepcopy(student.model.peft_config["default"]))
        for parameter_name, parameter in student.named_parameters():
            if own in parameter_name:
                torch.nn.init.normal_(parameter.requires_grad_(False), std=0.1)
        teachers.add(name, Adapter(student, own, student, case.max_forward_tokens))
    return teachers


@contextmanager
def smaller_pieces(size: int | None):
    """Has logits computed for so many positions at once."""

    def smaller(model, function, usual, *tensors):
        return in_chunks(model, function, size or usual, *tensors)

    with patch.object(score, "in_chunks", smaller), patch.object(divergence, "in_chunks", smaller):
        yield


def step(case: Case, strategy: str = "ddp") -> dict[str, dict[str, torch.Tensor]]:
    """Gradients and weights after one update."""
    policy = policy_of(case)
    with torch.no_grad():
        make = distilled_groups if case.distilled else fixed_groups
        groups = make(policy.model, sampling())
    if case.share is text_to_the_second:
        for rollout in groups[0].rollouts:
            for context in rollout.contexts:
                context.spans = [span for span in context.spans if not span.views]
                context.spans.insert(0, Span(Provenance.PROMPT, (30, 31)))
    optimizer = partial(torch.optim.SGD, lr=0.01) if case.settings.updates > 1 else SGD
    kwargs = {"policy": policy, "optimizer": optimizer}
    kwargs |= {"max_forward_tokens": case.max_forward_tokens}
    if case.distilled:
        module = OGMOPD(teachers_of(case, policy), case.distilled, **kwargs)
    else:
        module = GDGRPO(case.settings, **kwargs)
    clip: dict[str, Any] = {"gradient_clip_val": case.clip} if case.clip else {}
    clip |= {"precision": "bf16-mixed"} if case.half else {}
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    with smaller_pieces(case.logits_chunk):
        keep = kept(module, groups, case.micro, STRATEGIES[strategy](), case.share, **clip)
    gradients = keep.gradients
    if case.clip:
        # What was left of the gradient after clipping: one step of SGD at a rate of 1.
        gradients = {name: before[name] - keep.weights[name] for name in gradients}
    return {"gradients": gradients, "weights": keep.weights}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in args.cases:
        found[name] = step((CASES | HALF_CASES)[name], args.strategy)
        if int(os.environ.get("RANK", 0)) == 0:
            print(name, flush=True)
            torch.save(found, args.out)
