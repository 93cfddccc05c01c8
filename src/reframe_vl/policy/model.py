"""A vision-language model behind one small interface, whatever its family.

The Qwen3.5, Qwen3-VL and Qwen2.5-VL classes of transformers differ in their vision tower's
output and in deep-stack features; this file is where those differences end.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from reframe_vl.policy import prefix_tree
from reframe_vl.policy.forest import Forest
from reframe_vl.policy.inputs import ExpandedContext, expand
from reframe_vl.policy.lockstep import Lockstep
from reframe_vl.policy.views import ViewMaker
from reframe_vl.policy.visual_cache import Layers, TowerName, VisualCache
from reframe_vl.types import Context, Modality, Sampling, View

logger = logging.getLogger(__name__)

_TOWER_TOKENS = 16384
"""Visual tokens that the tower makes at once where no gradient asks for all of them."""


@dataclass(frozen=True)
class VisualFeatures:
    """The vision tower's output for distinct views, found by content hash.

    Attributes:
        rows: Where each view's tokens lie in ``embeds``.
        embeds: Token embeddings.
        deepstack: One tensor for each of the first decoder layers that take visual features.
    """

    rows: dict[str, slice]
    embeds: Float[Tensor, "N hidden"]
    deepstack: tuple[Float[Tensor, "N hidden"], ...]

    def gather(
        self, views: Sequence[View]
    ) -> tuple[Float[Tensor, "M hidden"], list[Float[Tensor, "M hidden"]]]:
        """Features of views in reading order, repeated where one is shown again."""
        index = torch.cat(
            [torch.arange(self.rows[v.hash].start, self.rows[v.hash].stop) for v in views]
        ).to(self.embeds.device)
        # Not by brackets: their backward pass adds one number at a time.
        return (
            self.embeds.index_select(0, index),
            [layer.index_select(0, index) for layer in self.deepstack],
        )


@dataclass(frozen=True)
class Batch:
    """Right- or left-padded rows of expanded contexts.

    Attributes:
        ids: Token ids, shape (B, T).
        positions: Rotary positions, shape (3, B, T).
        lengths: Tokens of each row.
        image_mask: Which tokens are images or videos; from the contexts, never from the ids.
    """

    ids: Int[Tensor, "B T"]
    positions: Int[Tensor, "3 B T"]
    lengths: list[int]
    image_mask: Bool[Tensor, "B T"]
    views: list[View]


class VisionLanguageModel(nn.Module):
    """Wraps a transformers model (or a PEFT model around one) of a Qwen-VL family.

    Attributes:
        model: The wrapped model; its parameters are this module's parameters.
        view_maker: Resizes images for this model.
        visual_cache: Keeps what a frozen vision tower gave; None keeps nothing.
        lockstep: Of ranks that each hold a part of the parameters; None where each has all.
        dtype: Of the weights as they were loaded: what the model computes in, and is served and
            exported in.
        placeholders: The ids that stand for an image and for a video.
    """

    def __init__(
        self, model: nn.Module, view_maker: ViewMaker, visual_cache: VisualCache | None = None
    ) -> None:
        """Wraps a model.

        Raises:
            ValueError: The model lacks a vision tower or a language model where expected.
        """
        super().__init__()
        self.model = model
        self.view_maker = view_maker
        self.visual_cache = visual_cache
        self.lockstep: Lockstep | None = None
        self._tower_name = TowerName()
        base = self.base
        self.dtype: torch.dtype = base.dtype  # type: ignore[assignment]
        inner = getattr(base, "model", None)
        if not all(hasattr(inner, name) for name in ("visual", "language_model")):
            raise ValueError(
                f"{type(base).__name__} is not of a known family: Qwen3.5, Qwen3-VL and Qwen2.5-VL "
                "models have model.visual and model.language_model."
            )
        # Kept, since transformers' configurations are slow to read and every context asks.
        config = self.config
        self.placeholders = {
            Modality.IMAGE: int(config.image_token_id),
            Modality.VIDEO: int(config.video_token_id),
        }
        # Only Qwen2.5-VL's videos run along the time axis of their positions.
        self._tokens_per_second = getattr(config.vision_config, "tokens_per_second", None)
        # Older releases have no deep-stack argument: features handed to it would be lost.
        forward = inspect.signature(self.language_model.forward).parameters
        self._takes_deepstack = "deepstack_visual_embeds" in forward
        self.shares_prefixes = prefix_tree.install(self.language_model)
        if not self.shares_prefixes:
            logger.warning(
                "The layers of %s are not known to prefix_tree: contexts are scored one a row.",
                type(self.language_model).__name__,
            )

    @property
    def base(self) -> nn.Module:
        """The transformers model, also inside a PEFT wrapper (whose layers sit in it)."""
        model: nn.Module = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.base.config

    @property
    def language_model(self) -> nn.Module:
        """The decoder, without its head."""
        return self.base.model.language_model  # type: ignore[union-attr, return-value]

    @property
    def visual(self) -> nn.Module:
        """The vision tower."""
        return self.base.model.visual  # type: ignore[union-attr, return-value]

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives."""
        return next(self.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def recomputes_layers(self) -> bool:
        """Whether gradient checkpointing is at work."""
        return self.training and bool(self.base.is_gradient_checkpointing)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Eval mode and no gradients: in training mode checkpointing would discard caches."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad(), self._own_precision():
                yield
        finally:
            self.train(training)

    def _own_precision(self) -> AbstractContextManager[object]:
        """Mixed precision where parameters are wider than what the model computes in."""
        if all(p.dtype.itemsize <= self.dtype.itemsize for p in self.parameters()):
            return nullcontext()
        # Each weight is rounded once for all forwards within, whatever is around them.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=True)

    def widen_trained(self) -> None:
        """Keeps what is trained in single precision.

        An update of a millionth is nothing to a weight in half precision, which has three digits.
        """
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize:
                parameter.data = parameter.data.float()

    def narrow(self) -> None:
        """Rounds the parameters to what the model computes in; buffers stay as they are."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(self.dtype)

    # ------------------------------------------------------------------ images and videos

    def encode(self, views: Sequence[View]) -> VisualFeatures | None:
        """Runs the vision tower once for each distinct view; None without views."""
        distinct = list({view.hash: view for view in views}.values())
        if not distinct:
            return None
        # Images of one size are neighbours, which lets equal blocks be attended to together.
        distinct.sort(key=lambda view: view.grid_thw)
        trained = any(parameter.requires_grad for parameter in self.visual.parameters())
        # A frozen tower keeps no graph, although gradient checkpointing lets its inputs need one.
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            # With adapters in the tower its output depends on which of them is at work.
            adapted = any("lora_" in name for name, _ in self.visual.named_parameters())
            if trained or adapted or self.visual_cache is None:
                layers = self._run_tower(distinct)
            else:
                kept = self.visual_cache.layers(
                    self._tower_name.of(self.visual), distinct, self._run_tower_apart
                )
                layers = tuple(
                    torch.cat([layer.to(self.device) for layer in same])
                    for same in zip(*kept, strict=True)
                )
        ends = list(itertools.accumulate(view.num_tokens for view in distinct))
        rows = {
            view.hash: slice(end - view.num_tokens, end)
            for view, end in zip(distinct, ends, strict=True)
        }
        return VisualFeatures(rows, layers[0], layers[1:])

    def _run_tower(self, views: Sequence[View]) -> Layers:
        """All at once where there is a gradient, else so many at a time as fit a forward."""
        # In lockstep all ranks run it equally often.
        if torch.is_grad_enabled() or self.lockstep is not None:
            return self._run_tower_once(views)
        pieces, first, tokens = [], 0, 0
        for number, view in enumerate(views):
            if number > first and tokens + view.num_tokens > _TOWER_TOKENS:
                pieces.append(self._run_tower_once(views[first:number]))
                first, tokens = number, 0
            tokens += view.num_tokens
        pieces.append(self._run_tower_once(views[first:]))
        return tuple(torch.cat(same) for same in zip(*pieces, strict=True))

    def _run_tower_once(self, views: Sequence[View]) -> Layers:
        patches = torch.from_numpy(self.view_maker.patches(list(views)))
        grid = torch.tensor([view.grid_thw for view in views])
        dtype = next(self.visual.parameters()).dtype
        output = self.visual(
            patches.to(self.device, dtype), grid_thw=grid.to(self.device), return_dict=True
        )
        return output.pooler_output, *(getattr(output, "deepstack_features", None) or ())

    def _run_tower_apart(self, views: Sequence[View]) -> list[Layers]:
        """The same, each view's tokens by themselves."""
        sizes = [view.num_tokens for view in views]
        return list(zip(*(layer.split(sizes) for layer in self._run_tower(views)), strict=True))

    # ------------------------------------------------------------------ text

    def expand(self, context: Context) -> ExpandedContext:
        """Expands a context for this model."""
        return expand(
            context, self.placeholders, self.view_maker.merge_size, self._tokens_per_second
        )

    def batch(self, rows: Sequence[ExpandedContext], starts: Sequence[int] | None = None) -> Batch:
        """Pads rows on the right.

        Args:
            rows: Expanded contexts.
            starts: Where each row begins (tokens before it are already in a cache).
        """
        starts = starts or [0] * len(rows)
        lengths = [len(row.token_ids) - start for row, start in zip(rows, starts, strict=True)]
        width = max(lengths)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        positions = torch.zeros(3, len(rows), width, dtype=torch.long)
        image_mask = torch.zeros(len(rows), width, dtype=torch.bool)
        views: list[View] = []
        for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            ids[index, :length] = torch.from_numpy(row.token_ids[start:])
            positions[:, index, :length] = torch.from_numpy(row.positions[:, start:])
            image_mask[index, :length] = torch.from_numpy(row.image_mask[start:])
            views += row.views_from(start)
        device = self.device
        return Batch(ids.to(device), positions.to(device), lengths, image_mask.to(device), views)

    def hidden_states(
        self, batch: Batch, features: VisualFeatures | None, **kwargs: Any
    ) -> Float[Tensor, "B T hidden"]:
        """Runs the decoder.

        Right padding needs no mask: a causal model's tokens never see what follows them.

        Args:
            batch: The rows.
            features: Of at least the batch's images.
            **kwargs: For the decoder: cache, attention mask.
        """
        language_model = self.language_model
        embeds = language_model.get_input_embeddings()(batch.ids)  # type: ignore[operator]
        if batch.views:
            if features is None:
                raise ValueError("The batch shows images but no visual features were given.")
            visual, deepstack = features.gather(batch.views)
            embeds = embeds.masked_scatter(batch.image_mask[..., None], visual.to(embeds.dtype))
            if deepstack and self._takes_deepstack:
                kwargs.update(visual_pos_masks=batch.image_mask, deepstack_visual_embeds=deepstack)
        kwargs.setdefault("use_cache", False)
        output = language_model(inputs_embeds=embeds, position_ids=batch.positions, **kwargs)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def forest_states(
        self, forest: Forest, features: VisualFeatures | None
    ) -> Float[Tensor, "T hidden"]:
        """Runs the decoder on packed contexts, each shared prefix once."""
        device = self.device
        batch = Batch(
            torch.from_numpy(forest.token_ids).to(device)[None],
            torch.from_numpy(forest.positions).to(device)[:, None],
            [len(forest)],
            torch.from_numpy(forest.image_mask).to(device)[None],
            forest.views,
        )
        layout = {prefix_tree.LAYOUT: prefix_tree.Layout(forest, device)}
        return self.hidden_states(batch, features, **layout)[0]

    def head(self, hidden: Float[Tensor, "N hidden"]) -> Float[Tensor, "N V"]:
        """Float32 logits."""
        logits: Tensor = self.base.lm_head(hidden)  # type: ignore[operator]
        return logits.float()


def sampling_log_probs(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Log-probabilities of the distribution that tokens are drawn from.

    Temperature first, then banned ids out of the normaliser. A banned id keeps a finite value
    (its logit against the allowed ones), so that external text which holds one can be scored.
    Greedy decoding reports the distribution at temperature 1.
    """
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if not sampling.banned_ids:
        return logits.log_softmax(-1)
    banned = torch.tensor(sampling.banned_ids, device=logits.device)
    allowed = logits.index_fill(-1, banned, float("-inf"))
    return logits - allowed.logsumexp(-1, keepdim=True)
