import numpy as np
import pytest
import torch

from reframe_vl.policy.inputs import expand
from reframe_vl.types import Context, Provenance, Span
from tiny import FAMILIES, random_context, tiny_model, tokenizer

PLACEHOLDERS = tiny_model("qwen3_vl").placeholders


@pytest.mark.parametrize("family", FAMILIES)
def test_b15_positions_equal_the_models_own_rope_index(family):
    model = tiny_model(family)
    rng = np.random.default_rng(0)
    for turns in (1, 2, 3):
        row = model.expand(random_context(rng, model.view_maker, turns))
        ids = torch.from_numpy(row.token_ids)[None]
        types = torch.from_numpy(row.image_mask).int()[None]
        grid = torch.tensor([view.grid_thw for _, view in row.blocks])
        expected, delta = model.base.model.get_rope_index(ids, types, image_grid_thw=grid)
        np.testing.assert_array_equal(row.positions, expected[:, 0].numpy())
        assert row.next_position == delta.item() + len(row.token_ids)


def test_b16_a_span_whose_placeholders_and_images_differ_is_refused():
    image = tokenizer().convert_tokens_to_ids("<|image_pad|>")
    rng = np.random.default_rng(0)
    context = random_context(rng, tiny_model("qwen3_vl").view_maker, 1)
    view = context.views[0]
    for ids, views in (((image,), (view, view)), ((image, image), (view,)), ((40,), (view,))):
        with pytest.raises(ValueError, match="placeholders"):
            expand(Context([Span(Provenance.OBSERVED, ids, views=views)]), PLACEHOLDERS, 2)


def test_b09_a_sampled_placeholder_id_is_text_and_takes_no_pixels():
    image = tokenizer().convert_tokens_to_ids("<|image_pad|>")
    model = tiny_model("qwen3_vl")
    context = random_context(np.random.default_rng(1), model.view_maker, 1)
    plain = model.expand(context)
    context.spans.append(Span(Provenance.SAMPLED, (7, image, 9), logprobs=(0.0, 0.0, 0.0)))
    row = model.expand(context)
    assert len(row.token_ids) == len(plain.token_ids) + 3
    assert row.image_mask.sum() == plain.image_mask.sum()
    assert row.token_ids[-2] == image


def test_b13_trained_positions_are_exactly_the_sampled_spans():
    model = tiny_model("qwen3_vl")
    context = random_context(np.random.default_rng(2), model.view_maker, 3)
    row = model.expand(context)
    sampled = [t for s in context.spans if s.provenance is Provenance.SAMPLED for t in s.token_ids]
    assert row.token_ids[row.trained].tolist() == sampled
    at, expected = 0, []
    for span in context.spans:
        if span.trained:
            expected += range(at, at + len(span))
        at += len(span)
    assert row.trained.tolist() == expected
    assert at == len(context) == len(row.token_ids)


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="first token"):
        expand(Context([Span(Provenance.SAMPLED, (40,))]), PLACEHOLDERS, 2)
