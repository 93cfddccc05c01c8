"""The memory that a rank takes: an estimate from a model's sizes and a run's settings.

Weights, gradients and optimiser states are counted; what forwards keep is estimated, with the
terms that outweigh the others: the layers' inputs, one layer's inside, and the logits of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from reframe_vl.budget.shape import Shape

STRATEGIES = ("auto", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3")

_GIB = 2**30
_SINGLE = 4
"""Bytes of a number of what is trained, whatever forwards compute in."""


@dataclass(frozen=True)
class Settings:
    """What of a run's settings decides on its memory.

    Attributes:
        strategy: One of ``STRATEGIES``.
        ranks: Processes that train, one an accelerator.
        bytes_per_number: Of weights in a forward.
        optimizer_numbers: That the optimiser keeps for each trained one.
        forward_tokens: Tokens of a forward.
        logits_chunk: Positions whose logits are held at once.
        recomputes: Whether layers are computed again when backing up.
        reference: Whether a copy of the initial policy is kept.
        teachers: Whole models that are kept beside the policy.
        sequences: Rollouts that this rank generates at once; 0 where an engine of its own does.
        context_tokens: The longest context.
        engine_share: Of the accelerator's memory, that a colocated vLLM takes.
        device_gib: Memory of an accelerator.
    """

    strategy: str
    ranks: int
    bytes_per_number: int
    optimizer_numbers: int
    forward_tokens: int
    logits_chunk: int
    recomputes: bool
    reference: bool
    teachers: int
    sequences: int
    context_tokens: int
    engine_share: float
    device_gib: float

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"strategy={self.strategy} is unknown: choose one of {', '.join(STRATEGIES)}."
            )


def memory(shape: Shape, settings: Settings) -> dict[str, float]:
    """The terms of a rank's memory in GiB, the greatest sum of which is at work at one time."""
    terms = {
        "weights": _weights(shape, settings),
        "working copies": _copies(shape, settings),
        "gradients": _gradients(shape, settings),
        "optimiser": _optimizer(shape, settings),
        "reference and teachers": _beside(shape, settings),
        "activations": _activations(shape, settings),
        "logits": _logits(shape, settings),
        "cache of rollouts": _cache(shape, settings),
        "vLLM": settings.engine_share * settings.device_gib * _GIB,
    }
    return {name: size / _GIB for name, size in terms.items()}


def together(terms: dict[str, float]) -> float:
    """The most at one time: rollouts and gradients are never there together."""
    training = ("working copies", "gradients", "activations", "logits")
    always = sum(size for name, size in terms.items() if name not in (*training, _CACHE))
    return always + max(sum(terms[name] for name in training), terms[_CACHE])


_CACHE = "cache of rollouts"


def _sharded(settings: Settings) -> bool:
    return settings.strategy in ("fsdp2", "deepspeed_zero3")


def _frozen_tower(shape: Shape, settings: Settings) -> int:
    """Parameters that FSDP2 leaves whole."""
    return 0 if shape.vision_trained or settings.strategy != "fsdp2" else shape.vision


def _trained_size(settings: Settings) -> int:
    """DeepSpeed keeps single precision beside the weights, with the optimiser."""
    return settings.bytes_per_number if settings.strategy.startswith("deepspeed") else _SINGLE


def _weights(shape: Shape, settings: Settings) -> float:
    frozen = shape.parameters - shape.trained
    kept = _frozen_tower(shape, settings)
    spread = (frozen - kept) * settings.bytes_per_number + shape.trained * _trained_size(settings)
    ranks = settings.ranks if _sharded(settings) else 1
    return kept * settings.bytes_per_number + spread / ranks


def _copies(shape: Shape, settings: Settings) -> float:
    """Of weights, for a forward.

    Spread ones are whole for a while: all outside of the layers, a layer and the next one. Others
    are cast where they are wider than what is computed in, and kept for the backward pass; of
    layers that are computed again one at a time.
    """
    if not _sharded(settings) or settings.ranks == 1:
        if _trained_size(settings) <= settings.bytes_per_number:
            return 0.0
        some = shape.outside_trained + shape.largest_layer
        cast = min(shape.trained, some) if settings.recomputes else shape.trained
        return cast * settings.bytes_per_number
    outside = shape.outside - (shape.vision if _frozen_tower(shape, settings) else 0)
    return (max(outside, 0) + 2 * shape.largest_layer) * settings.bytes_per_number


def _gradients(shape: Shape, settings: Settings) -> float:
    size = _trained_size(settings)
    if settings.strategy in ("auto", "ddp") or settings.ranks == 1:
        return shape.trained * size
    # Whole until they are spread: those outside of the layers, and a layer's, which is added up
    # over ranks in a copy.
    layer = min(shape.largest_layer, shape.trained)
    whole = (shape.outside_trained + layer) * settings.bytes_per_number + layer * size
    return shape.trained / settings.ranks * size + whole


def _optimizer(shape: Shape, settings: Settings) -> float:
    numbers = settings.optimizer_numbers
    if settings.strategy in ("auto", "ddp"):
        return shape.trained * numbers * _SINGLE
    if settings.strategy.startswith("deepspeed"):
        numbers += 1
    return shape.trained / settings.ranks * numbers * _SINGLE


def _beside(shape: Shape, settings: Settings) -> float:
    whole = shape.parameters * settings.bytes_per_number
    kept = _frozen_tower(shape, settings) * settings.bytes_per_number
    spread = kept + (whole - kept) / (settings.ranks if settings.strategy == "fsdp2" else 1)
    return settings.reference * spread + settings.teachers * whole


def _activations(shape: Shape, settings: Settings) -> float:
    """Of a layer: its input, two norms, attention, and three of the feed-forward part's width."""
    inside = 3 * shape.hidden + shape.attention_width + 3 * shape.intermediate
    layer = settings.forward_tokens * inside * settings.bytes_per_number
    inputs = settings.forward_tokens * shape.hidden * settings.bytes_per_number
    return shape.layers * inputs + 2 * layer if settings.recomputes else shape.layers * layer


def _logits(shape: Shape, settings: Settings) -> float:
    """In single precision: logits, their log-probabilities and the gradient; and the head's own."""
    positions = min(settings.logits_chunk, settings.forward_tokens)
    return positions * shape.vocabulary * (3 * 4 + settings.bytes_per_number)


def _cache(shape: Shape, settings: Settings) -> float:
    a_sequence = shape.kv_numbers * settings.context_tokens + shape.state_numbers
    size = settings.sequences * a_sequence * settings.bytes_per_number
    if settings.sequences and _sharded(settings):
        # The transformers engine generates with weights that are gathered whole.
        size += shape.parameters * settings.bytes_per_number
    return size
