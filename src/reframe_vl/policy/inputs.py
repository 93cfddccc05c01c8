"""From contexts to a model's inputs: expansion of placeholders and 3-axis positions.

The only owner of expansion: everything else holds one placeholder an image or video.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from reframe_vl.types import Context, Modality, View


@dataclass(frozen=True)
class ExpandedContext:
    """A context as the model takes it.

    Attributes:
        token_ids: Expanded ids, shape (T,).
        positions: Rotary positions along time, height and width, shape (3, T).
        next_position: Position of the token that follows, the same on all three axes.
        trained: Indices into ``token_ids`` of the tokens that are trained, in order.
        blocks: Where each view's tokens start, with the view, in reading order.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    next_position: int
    trained: npt.NDArray[np.int64]
    blocks: tuple[tuple[int, View], ...]

    @property
    def image_mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens are images or videos, shape (T,)."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, view in self.blocks:
            mask[start : start + view.num_tokens] = True
        return mask

    def shared_with(self, other: ExpandedContext) -> int:
        """Tokens at the beginning that both have, images compared as images."""
        return shared_prefix(self.token_ids, self.blocks, other.token_ids, other.blocks)

    def views_from(self, start: int) -> list[View]:
        """Views whose tokens begin at ``start`` or later."""
        return [view for at, view in self.blocks if at >= start]


def shared_prefix(
    token_ids: npt.NDArray[np.int64],
    blocks: Sequence[tuple[int, View]],
    other_ids: npt.NDArray[np.int64],
    other_blocks: Sequence[tuple[int, View]],
) -> int:
    """Tokens at the beginning that two expanded sequences have, images compared as images.

    Equal ids may stand for different images: the sequences part where the first of these begins.
    """
    both = min(len(token_ids), len(other_ids))
    shared = agreement(token_ids[:both], other_ids[:both])
    for mine, theirs in zip_longest(blocks, other_blocks):
        if mine != theirs:
            return min(shared, *(block[0] for block in (mine, theirs) if block is not None))
    return shared


def agreement(ids: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> int:
    """How many ids two arrays of one length have in common at their beginning."""
    differs = ids != others
    # The place of the first True; of none at all it would be 0.
    first = int(differs.argmax()) if len(differs) else 0
    return first if len(differs) and differs[first] else len(differs)


def expand(
    context: Context,
    placeholders: Mapping[Modality, int],
    merge_size: int,
    tokens_per_second: float | None = None,
) -> ExpandedContext:
    """Expands each view's placeholder and lays out positions.

    A sampled id that happens to be a placeholder's is never taken for an image: the placeholders
    in every span are checked against its views.

    Args:
        context: What is expanded.
        placeholders: The ids that stand for an image and for a video.
        merge_size: Patches along a side that become one token.
        tokens_per_second: As ``rotary_positions`` takes it.

    Raises:
        ValueError: A span's placeholders are not those of its views, or the very first token is to
            be trained, which nothing predicts.
    """
    pieces: list[npt.NDArray[np.int64]] = []
    trained: list[npt.NDArray[np.int64]] = []
    blocks: list[tuple[int, View]] = []
    length = 0
    for number, span in enumerate(context.spans):
        ids = span.ids
        if not span.views:
            if span.trained:
                trained.append(np.arange(length, length + len(ids)))
            pieces.append(ids)
            length += len(ids)
            continue
        # Two comparisons: ``isin`` takes ten times as long on so few tokens.
        image, video = placeholders[Modality.IMAGE], placeholders[Modality.VIDEO]
        at = np.flatnonzero((ids == image) | (ids == video))
        if ids[at].tolist() != [placeholders[view.modality] for view in span.views]:
            raise ValueError(
                f"Span {number} ({span.provenance}) has {len(at)} placeholders, which are not "
                f"those of its {len(span.views)} views: a span and its views are appended together."
            )
        cursor = 0
        for position, view in zip([*at.tolist(), len(ids)], [*span.views, None], strict=True):
            if span.trained:
                trained.append(np.arange(length, length + position - cursor))
            pieces.append(ids[cursor:position])
            length += position - cursor
            if view is not None:
                pieces.append(np.full(view.num_tokens, ids[position]))
                blocks.append((length, view))
                length += view.num_tokens
            cursor = position + 1
    trained_T = np.concatenate([np.zeros(0, np.int64), *trained])
    if len(trained_T) and trained_T[0] == 0:
        raise ValueError("A context's first token cannot be trained: it needs a prompt before it.")
    positions, next_position = rotary_positions(length, blocks, merge_size, tokens_per_second)
    return ExpandedContext(
        np.concatenate([np.zeros(0, np.int64), *pieces]),
        positions,
        next_position,
        trained_T,
        tuple(blocks),
    )


def rotary_positions(
    length: int,
    blocks: list[tuple[int, View]],
    merge_size: int,
    tokens_per_second: float | None = None,
) -> tuple[npt.NDArray[np.int64], int]:
    """Positions of the Qwen-VL families: text advances all axes, an image or video spans a grid.

    Args:
        length: Number of expanded tokens.
        blocks: Where each view's tokens start, with the view.
        merge_size: Patches along a side that become one token.
        tokens_per_second: How far a second of a video reaches along time; None for families whose
            videos are one temporal patch a view.

    Returns:
        Positions of shape (3, length), and the position of the next token.

    Raises:
        ValueError: Such a family is shown a view of several temporal patches.
    """
    positions = np.empty((3, length), np.int64)
    cursor = position = 0
    for start, view in blocks:
        positions[:, cursor:start] = np.arange(position, position + start - cursor)
        position += start - cursor
        time, height, width = view.grid_thw
        height, width = height // merge_size, width // merge_size
        cursor = start + time * height * width
        if time > 1 and tokens_per_second is None:
            raise ValueError(
                f"View {view.hash} has {time} temporal patches, but this model takes videos one "
                "temporal patch a view: set model.family to the family of model.path."
            )
        # In single precision, as in transformers: rounding decides which whole number it is.
        interval = np.float32(tokens_per_second or 0) * np.float32(view.patch_seconds)
        positions[:, start:cursor] = position + _grid(time, height, width, float(interval))
        # As in transformers since 5.3, however long a video is: earlier releases went on from the
        # largest position on any axis.
        position += max(height, width)
    positions[:, cursor:] = np.arange(position, position + length - cursor)
    return positions, position + length - cursor


@lru_cache(maxsize=1024)
def _grid(time: int, height: int, width: int, interval: float) -> npt.NDArray[np.int64]:
    """Positions within a view, shape (3, T)."""
    grid = np.indices((time, height, width)).reshape(3, -1)
    grid[0] = grid[0].astype(np.float32) * np.float32(interval)
    grid.flags.writeable = False
    return grid
