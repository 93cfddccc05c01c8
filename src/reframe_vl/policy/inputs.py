"""From contexts to a model's inputs: expansion of placeholders and 3-axis positions.

The only owner of expansion: everything else holds one placeholder an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reframe_vl.types import Context, View


@dataclass(frozen=True)
class ExpandedContext:
    """A context as the model takes it.

    Attributes:
        token_ids: Expanded ids, shape (T,).
        positions: Rotary positions along time, height and width, shape (3, T).
        next_position: Position of the token that follows, the same on all three axes.
        trained: Indices into ``token_ids`` of the tokens that are trained, in order.
        blocks: Where each image's tokens start, with the image, in reading order.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    next_position: int
    trained: npt.NDArray[np.int64]
    blocks: tuple[tuple[int, View], ...]

    @property
    def image_mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens are images, shape (T,)."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, view in self.blocks:
            mask[start : start + view.num_tokens] = True
        return mask

    def views_from(self, start: int) -> list[View]:
        """Images whose tokens begin at ``start`` or later."""
        return [view for at, view in self.blocks if at >= start]


def expand(context: Context, image_token_id: int, merge_size: int) -> ExpandedContext:
    """Expands each image's placeholder and lays out positions.

    A sampled id that happens to be the placeholder's is never taken for an image: the number of
    placeholders in every span is checked against its images.

    Raises:
        ValueError: A span's placeholders and images differ in number, or the very first token is
            to be trained, which nothing predicts.
    """
    ids: list[int] = []
    trained: list[int] = []
    blocks: list[tuple[int, View]] = []
    for number, span in enumerate(context.spans):
        views = iter(span.views)
        placeholders = 0
        for token in span.token_ids:
            if token == image_token_id and span.views:
                placeholders += 1
                view = next(views, None)
                if view is not None:
                    blocks.append((len(ids), view))
                    ids.extend([token] * view.num_tokens)
                continue
            if span.trained:
                trained.append(len(ids))
            ids.append(token)
        if placeholders != len(span.views):
            raise ValueError(
                f"Span {number} ({span.provenance}) has {placeholders} image placeholders but "
                f"{len(span.views)} images: a span and its images are appended together."
            )
    if trained and trained[0] == 0:
        raise ValueError("A context's first token cannot be trained: it needs a prompt before it.")
    positions, next_position = rotary_positions(len(ids), blocks, merge_size)
    return ExpandedContext(
        np.asarray(ids, np.int64),
        positions,
        next_position,
        np.asarray(trained, np.int64),
        tuple(blocks),
    )


def rotary_positions(
    length: int, blocks: list[tuple[int, View]], merge_size: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Positions of the Qwen-VL families: text advances all axes, an image spans a grid.

    Args:
        length: Number of expanded tokens.
        blocks: Where each image's tokens start, with the image.
        merge_size: Patches along a side that become one token.

    Returns:
        Positions of shape (3, length), and the position of the next token.
    """
    positions = np.empty((3, length), np.int64)
    cursor = position = 0
    for start, view in blocks:
        positions[:, cursor:start] = position + np.arange(start - cursor)
        position += start - cursor
        _, height, width = view.grid_thw
        height, width = height // merge_size, width // merge_size
        cursor = start + height * width
        positions[0, start:cursor] = position
        positions[1, start:cursor] = position + np.repeat(np.arange(height), width)
        positions[2, start:cursor] = position + np.tile(np.arange(width), height)
        position += max(height, width)
    positions[:, cursor:] = position + np.arange(length - cursor)
    return positions, position + length - cursor
