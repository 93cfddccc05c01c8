"""The least time of a step: bounds by arithmetic, by memory and by what ranks send each other.

No run is as fast. They say which part of a step is the longest, and what a change could bring.
"""

from __future__ import annotations

from dataclasses import dataclass

from reframe_vl.budget.memory import Settings
from reframe_vl.budget.shape import Shape


@dataclass(frozen=True)
class Device:
    """An accelerator, by its maker's figures.

    Attributes:
        gib: Memory.
        flops: A second, of dense half-precision products.
        bytes_per_s: From its memory.
        link_bytes_per_s: To its neighbours, one way.
    """

    gib: float
    flops: float
    bytes_per_s: float
    link_bytes_per_s: float


DEVICES = {
    "h200": Device(141e9 / 2**30, 989e12, 4.8e12, 450e9),
    "h100": Device(80e9 / 2**30, 989e12, 3.35e12, 450e9),
    "a100": Device(80e9 / 2**30, 312e12, 2.0e12, 300e9),
    "l40s": Device(48e9 / 2**30, 362e12, 0.86e12, 32e9),
}


@dataclass(frozen=True)
class Step:
    """How much a step has to do, over all ranks.

    Attributes:
        prompts: P.
        rollouts: G, of each prompt.
        prompt_tokens: That the rollouts of a group share: the question and what it is asked about.
        own_tokens: That a rollout adds.
        sampled_tokens: Those of them that the policy writes.
        micro_batches: K, of an update.
    """

    prompts: int
    rollouts: int
    prompt_tokens: int
    own_tokens: int
    sampled_tokens: int
    micro_batches: int

    @property
    def packed_tokens(self) -> int:
        """That training runs through: what a group shares runs once."""
        return self.prompts * (self.prompt_tokens + self.rollouts * self.own_tokens)


def seconds(shape: Shape, settings: Settings, step: Step, device: Device) -> dict[str, float]:
    """The least time of each part of a step."""
    ranks = settings.ranks
    passes = 2 + 2 + (2 if shape.trained > shape.parameters / 2 else 0)
    passes += 2 if settings.recomputes else 0
    flops = passes * shape.parameters * step.packed_tokens
    size = settings.bytes_per_number
    batch = step.prompts * step.rollouts / ranks
    context = step.prompt_tokens + step.own_tokens / 2
    read = shape.parameters + batch * (shape.kv_numbers * context + shape.state_numbers)
    sent = 0.0
    if ranks > 1:
        share = (ranks - 1) / ranks
        # To gather weights for the forward and the backward pass, and to add up gradients: in
        # single precision, but by DeepSpeed.
        per_micro = {"fsdp2": 2.0 * size + 4, "deepspeed_zero3": 3.0 * size}
        once = {"ddp": 2.0 * 4, "deepspeed_zero2": 2.0 * size}
        sent = share * (
            per_micro.get(settings.strategy, 0.0) * step.micro_batches * shape.parameters
            + once.get(settings.strategy, 0.0) * shape.trained
        )
    return {
        "generation": step.sampled_tokens * read * size / device.bytes_per_s,
        "training": flops / (ranks * device.flops),
        "communication": sent / device.link_bytes_per_s,
        "weight sync": 0.0 if settings.sequences else shape.trained * size / 25e9,
    }
