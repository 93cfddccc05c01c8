import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.policy.forest import plant
from reframe_vl.types import Context, Provenance, Span
from tiny import random_context, random_view, tiny_model, tokenizer

IMAGE = tokenizer().convert_tokens_to_ids("<|image_pad|>")
MODEL = tiny_model("qwen3_vl")


def context(*runs, views=()):
    ids = tuple(t for run in runs for t in run)
    return Context([Span(Provenance.PROMPT, ids, views=views)])


def expanded(contexts):
    return [MODEL.expand(c) for c in contexts]


def assert_faithful(forest, rows):
    """Every context can be read back from the packed row, and each token's path is its context."""
    for row, where in zip(rows, forest.where, strict=True):
        np.testing.assert_array_equal(forest.token_ids[where], row.token_ids)
        np.testing.assert_array_equal(forest.positions[:, where], row.positions)
        np.testing.assert_array_equal(forest.image_mask[where], row.image_mask)
        if len(where):
            last = next(
                i for i, n in enumerate(forest.nodes) if n.start <= where[-1] < n.start + n.length
            )
            path = [*forest.ancestors(last), last]
            walked = np.concatenate(
                [np.arange(n.start, n.start + n.length) for n in (forest.nodes[i] for i in path)]
            )
            np.testing.assert_array_equal(walked[: len(where)], where)
    assert sum(n.length for n in forest.nodes) == len(forest)


@given(
    st.lists(st.lists(st.integers(40, 42), max_size=12), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_any_contexts_are_packed_faithfully(runs, min_shared):
    rows = expanded([context([50], run) for run in runs])
    forest = plant(rows, min_shared)
    assert_faithful(forest, rows)
    assert len(forest) <= sum(len(r.token_ids) for r in rows)
    for index, node in enumerate(forest.nodes):
        assert node.parent < index
        assert node.path == sum(forest.nodes[a].length for a in forest.ancestors(index))


def test_a_groups_prompt_is_packed_once_and_turns_shared_by_some_are_a_level_below():
    prompt, turn = range(100, 130), range(140, 170)
    rows = expanded(
        [
            context(prompt, [60]),
            context(prompt, [61, 62]),
            context(prompt, turn, [63]),
            context(prompt, turn, [64, 65]),
        ]
    )
    forest = plant(rows)
    assert_faithful(forest, rows)
    assert len(forest) == 30 + 1 + 2 + 30 + 1 + 2
    assert max(n.depth for n in forest.nodes) == 2


def test_equal_contexts_are_one_and_an_empty_suffix_takes_nothing():
    prompt = range(100, 130)
    rows = expanded([context(prompt, [60]), context(prompt, [60]), context(prompt)])
    forest = plant(rows)
    assert_faithful(forest, rows)
    assert len(forest) == 31


def test_other_images_are_other_prefixes_although_their_ids_are_equal():
    rng = np.random.default_rng(0)
    one, two = (random_view(rng, MODEL.view_maker, 64, 64) for _ in range(2))
    ids = (*range(100, 120), IMAGE, *range(120, 140))
    rows = expanded([context(ids, [60], views=(one,)), context(ids, [61], views=(one,))])
    assert len(plant(rows)) == len(rows[0].token_ids) + 1
    rows = expanded([context(ids, [60], views=(one,)), context(ids, [60], views=(two,))])
    forest = plant(rows)
    assert_faithful(forest, rows)
    # Only the text before the image is shared.
    assert len(forest) == 2 * len(rows[0].token_ids) - 20
    assert [v.hash for v in forest.views] == [one.hash, two.hash]


def test_groups_of_other_prompts_stand_side_by_side():
    rng = np.random.default_rng(0)
    prompts = [random_context(rng, MODEL.view_maker, 1).spans[0] for _ in range(3)]
    rows = expanded(
        [Context([p, Span(Provenance.SAMPLED, (90 + i,))]) for p in prompts for i in range(4)]
    )
    forest = plant(rows, min_shared=4)
    assert_faithful(forest, rows)
    assert len(forest) <= sum(len(dataclasses.replace(p)) for p in prompts) + 12
