"""A policy whose parameters are spread over ranks (FSDP2): each holds a part of every one.

A forward gathers a layer's parameters just before they are used, which every rank has to take part
in. So while training all ranks run the same forwards, whatever each has to score (``Lockstep``);
and where they do different things, as in generation, the parameters are gathered once before
(``whole``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from reframe_vl.policy.lockstep import Lockstep
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import predictive_states
from reframe_vl.types import Context, Modality, Provenance, Span

_ZERO3_MARK = "ds_id"
"""An attribute of parameters that ZeRO-3 has spread."""

_FILLER_SIDE = 64
"""Of the filler's image, in pixels; a view is never smaller than the model's own least size."""


def shard(
    model: VisionLanguageModel, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None
) -> None:
    """Spreads a policy's parameters over the ranks of a mesh.

    Decoder layers and, where it is trained, blocks of the vision tower are gathered one after the
    other; embeddings, head and the rest stay gathered from the first forward of a micro-batch to
    the end of its backward pass. A frozen vision tower stays whole on every rank: what is cached of
    its outputs differs from rank to rank, and so does how often it runs.

    Args:
        model: The policy.
        mesh: Of the ranks.
        compute_dtype: What parameters are gathered in; None: in their own. Gradients are added up
            over ranks in single precision, since sums of many in half lose what single tokens add.
    """
    frozen = not any(p.requires_grad for p in model.visual.parameters())
    kept = set(model.visual.parameters()) if frozen else set()
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32)
    blocks = list(model.language_model.layers)  # type: ignore[arg-type]
    if not frozen:
        blocks += list(model.visual.blocks)  # type: ignore[arg-type]
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Not resharded after each of its forwards: the head runs as often as a rank's tokens need.
    fully_shard(
        model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=kept
    )
    for name in ("encode", "hidden_states", "head"):
        register_fsdp_forward_method(model, name)
    model.lockstep = Lockstep(_filler(model, with_view=not frozen), mesh.get_group())


def in_lockstep(model: VisionLanguageModel) -> None:
    """Keeps forwards alike for DeepSpeed, whether it has spread the parameters or gradients alone.

    ZeRO-3 gathers a frozen tower too, which therefore runs in every forward, cached or not. ZeRO-2
    adds gradients of ranks up in the order in which they arrive, which must be the same on all.
    """
    if spread := _of_zero3(model):
        model.visual_cache = None
    trained = any(p.requires_grad for p in model.visual.parameters())
    model.lockstep = Lockstep(_filler(model, with_view=spread or trained), None)


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds only a part of the parameters."""
    return isinstance(model, FSDPModule) or _of_zero3(model)


def check_gatherable(model: nn.Module, wanted_by: str) -> None:
    """Checks that ``whole`` can gather a model, so that ranks may run different forwards.

    Raises:
        ValueError: DeepSpeed has spread it.
    """
    if _of_zero3(model):
        raise ValueError(
            f"{wanted_by} runs other forwards on each rank, for which DeepSpeed's ZeRO-3 has no "
            "weights: take strategy=fsdp2 or deepspeed_zero2."
        )


@contextmanager
def whole(model: VisionLanguageModel) -> Iterator[None]:
    """Gathers all parameters once, so that ranks can run different forwards, without gradients.

    All ranks enter it together. For a model that is not sharded it does nothing but that. ZeRO-3
    has no such state: there ranks go on in lockstep.
    """
    lockstep = model.lockstep
    if lockstep is None or _of_zero3(model):
        yield
        return
    if not isinstance(model, FSDPModule):
        model.lockstep = None
        try:
            yield
        finally:
            model.lockstep = lockstep
        return
    if not lockstep.begun:
        # The first forward tells which module is the outermost one: it must not be a layer.
        with model.inference():
            predictive_states(model, [])
    modules: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    inner = modules[1:]
    for module in inner:
        module.set_reshard_after_forward(False, recurse=False)
    for module in modules:
        module.unshard()
    model.lockstep = None
    try:
        yield
    finally:
        model.lockstep = lockstep
        for module in inner:
            module.set_reshard_after_forward(True, recurse=False)
        # Frees the gathered parameters, and forgets the order of forwards, by which the next
        # backward pass would fetch ahead: it differs from rank to rank.
        model.reset_iter_state()


def gathered(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one after the other, each whole; no two need be held at once.

    Where the model is sharded, all ranks go through it together, to its end.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if wanted(name):
            # ZeRO-3's are known by the parameter alone.
            yield name, full(parameters.get(name, tensor))


def pushed(model: VisionLanguageModel) -> Iterator[tuple[str, Tensor]]:
    """What an engine needs to follow the policy: its adapter where one is trained, else all.

    Weights are in what the model computes in, an adapter is as it is trained.
    """
    if isinstance(model.model, PeftModel):
        yield from gathered(model.model, lambda name: "lora_" in name)
        return
    for name, tensor in gathered(model.base):
        yield name, tensor.to(model.dtype)


def full(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all ranks, which call this together."""
    if hasattr(tensor, _ZERO3_MARK):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _of_zero3(model: nn.Module) -> bool:
    return any(hasattr(parameter, _ZERO3_MARK) for parameter in model.parameters())


def _filler(model: VisionLanguageModel, with_view: bool) -> Context:
    """A prompt, with an image where one is asked for, and a token to predict."""
    text = Span(Provenance.SAMPLED, (0, 0))
    if not with_view:
        return Context([Span(Provenance.PROMPT, (0,)), text])
    view = model.view_maker.view(np.zeros((_FILLER_SIDE, _FILLER_SIDE, 3), np.uint8))
    image = model.placeholders[Modality.IMAGE]
    return Context([Span(Provenance.PROMPT, (0, image), views=(view,)), text])
