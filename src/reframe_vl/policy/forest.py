"""Shared prefixes of a micro-batch: contexts laid out as a forest, each distinct prefix once.

The rollouts of a group share system prompt, media and question. A forest packs every shared run of
tokens once, followed by what differs, into one row:

    context 1   P P P P a a            node 0   P P P P          (shared by both)
    context 2   P P P P b b b    ─▶    node 1           a a      (parent 0)
                                       node 2           b b b    (parent 0)
    packed      P P P P a a b b b

Nothing here knows about models; ``prefix_tree`` runs one on a forest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reframe_vl.policy.inputs import ExpandedContext, agreement
from reframe_vl.types import View

Ints = npt.NDArray[np.int64]

MIN_SHARED = 16
"""A shorter shared run is packed with each context that has it: a node has a cost of its own."""


@dataclass(frozen=True)
class Node:
    """A run of tokens that its descendants share.

    Attributes:
        start: Where it lies in the packed row.
        length: Tokens.
        parent: Index of its parent, or -1.
        depth: Ancestors.
        path: Tokens of its ancestors, and so the index in a context at which it begins.
        leaf: Whether nothing follows it.
    """

    start: int
    length: int
    parent: int
    depth: int
    path: int
    leaf: bool


@dataclass(frozen=True)
class Forest:
    """Contexts, packed.

    Attributes:
        nodes: Parents before children, in packed order.
        token_ids: Packed ids, shape (T,).
        positions: Rotary positions, shape (3, T).
        image_mask: Which packed tokens are images.
        views: Images in packed order.
        where: For each context, the packed index of each of its tokens.
    """

    nodes: tuple[Node, ...]
    token_ids: Ints
    positions: Ints
    image_mask: npt.NDArray[np.bool_]
    views: list[View]
    where: list[Ints]

    def __len__(self) -> int:
        """Packed tokens."""
        return len(self.token_ids)

    def ancestors(self, index: int) -> list[int]:
        """A node's ancestors, the root first."""
        path = []
        while (index := self.nodes[index].parent) >= 0:
            path.append(index)
        return path[::-1]


def plant(rows: Sequence[ExpandedContext], min_shared: int = MIN_SHARED) -> Forest:
    """Packs contexts; equal contexts become one.

    Args:
        rows: Expanded contexts.
        min_shared: The shortest run of tokens that is shared.
    """
    keys = _keys(rows)
    planter = _Planter(rows, keys, min_shared)
    planter.split(list(range(len(rows))), start=0, parent=-1)
    return planter.forest()


def _keys(rows: Sequence[ExpandedContext]) -> list[Ints]:
    """Ids with images told apart: equal keys, equal inputs."""
    numbers: dict[str, int] = {}
    keys = []
    for row in rows:
        key = row.token_ids.copy()
        for at, view in row.blocks:
            number = numbers.setdefault(view.hash, len(numbers))
            key[at : at + view.num_tokens] = -1 - number
        keys.append(key)
    return keys


class _Planter:
    def __init__(self, rows: Sequence[ExpandedContext], keys: list[Ints], min_shared: int) -> None:
        self.rows, self.keys, self.min_shared = rows, keys, min_shared
        self.parents: list[int] = []
        self.ranges: list[tuple[int, int, int]] = []
        """(representative context, start, stop) of each node."""
        self.members: list[list[int]] = []

    def split(self, members: list[int], start: int, parent: int) -> None:
        """Plants contexts that agree up to ``start``, below ``parent``."""
        if len(members) == 1:
            self._node(members, start, len(self.keys[members[0]]), parent)
            return
        stop = start + self._common(members, start)
        if stop - start >= self.min_shared or all(len(self.keys[m]) == stop for m in members):
            parent, start = self._node(members, start, stop, parent), stop
        for group in self._by_next_token(members, stop):
            if len(self.keys[group[0]]) > start:
                self.split(group, start, parent)

    def _node(self, members: list[int], start: int, stop: int, parent: int) -> int:
        if start == stop:
            return parent
        self.parents.append(parent)
        self.ranges.append((members[0], start, stop))
        self.members.append(members)
        return len(self.ranges) - 1

    def _common(self, members: list[int], start: int) -> int:
        first = self.keys[members[0]][start:]
        shared = len(first)
        for member in members[1:]:
            other = self.keys[member][start : start + shared]
            shared = agreement(first[: len(other)], other)
        return shared

    def _by_next_token(self, members: list[int], at: int) -> list[list[int]]:
        """Contexts that go on at ``at``, by what they go on with; ended ones by themselves."""
        groups: dict[int | None, list[int]] = {}
        for member in members:
            key = self.keys[member]
            groups.setdefault(int(key[at]) if at < len(key) else None, []).append(member)
        return list(groups.values())

    def forest(self) -> Forest:
        starts = np.concatenate([[0], np.cumsum([stop - at for _, at, stop in self.ranges])])
        children = set(self.parents)
        nodes: list[Node] = []
        views: list[View] = []
        image_mask = np.zeros(int(starts[-1]), np.bool_)
        where = [np.empty(len(key), np.int64) for key in self.keys]
        for index, (member, at, stop) in enumerate(self.ranges):
            parent = self.parents[index]
            depth = nodes[parent].depth + 1 if parent >= 0 else 0
            begin = int(starts[index])
            nodes.append(Node(begin, stop - at, parent, depth, at, index not in children))
            for position, view in self.rows[member].blocks:
                if at <= position < stop:
                    views.append(view)
                    image_mask[begin + position - at :][: view.num_tokens] = True
            for context in self.members[index]:
                where[context][at:stop] = np.arange(begin, begin + stop - at)
        parts = [(self.rows[m], at, stop) for m, at, stop in self.ranges]
        return Forest(
            tuple(nodes),
            np.concatenate([row.token_ids[at:stop] for row, at, stop in parts]),
            np.concatenate([row.positions[:, at:stop] for row, at, stop in parts], axis=1),
            image_mask,
            views,
            where,
        )
