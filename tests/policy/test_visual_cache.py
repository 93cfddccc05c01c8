"""A frozen tower's outputs are computed once and are the same afterwards."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import score
from reframe_vl.policy.visual_cache import TowerName, VisualCache
from tiny import FAMILIES, random_context, random_view, sampling, tiny_model


def cached(family, max_mb=16.0, frozen=True):
    model = tiny_model(family)
    model.visual.requires_grad_(not frozen)
    model.visual_cache = VisualCache(max_mb)
    model.tower_runs = 0

    def count(*_):
        model.tower_runs += 1

    model.visual.register_forward_hook(count)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_features_score_as_fresh_ones_and_the_tower_runs_once(family):
    model = cached(family)
    rng = np.random.default_rng(0)
    contexts = [random_context(rng, model.view_maker) for _ in range(3)]
    cache, model.visual_cache = model.visual_cache, None
    expected = score(model, contexts, sampling()).logprobs_T
    model.visual_cache = cache
    score(model, contexts[:2], sampling())
    runs = model.tower_runs
    for _ in range(2):
        found = score(model, contexts, sampling()).logprobs_T
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    # The third context's images, once.
    assert model.tower_runs == runs + 1
    found.sum().backward()
    assert all(p.grad is None for p in model.visual.parameters())


def test_a_trained_tower_is_never_cached():
    model = cached("qwen3_vl", frozen=False)
    view = random_view(np.random.default_rng(0), model.view_maker)
    for _ in range(2):
        assert model.encode([view]).embeds.requires_grad
    assert (model.tower_runs, model.visual_cache.misses) == (2, 0)


def test_a_copy_shares_the_store_and_other_weights_do_not():
    model = cached("qwen3_vl")
    view = random_view(np.random.default_rng(0), model.view_maker)
    features = model.encode([view]).embeds
    other = copy.deepcopy(model)
    assert torch.equal(other.encode([view]).embeds, features)
    assert model.visual_cache.misses == 1
    with torch.no_grad():
        next(other.visual.parameters()).add_(0.1)
    assert not torch.equal(other.encode([view]).embeds, features)
    assert torch.equal(model.encode([view]).embeds, features)
    assert model.visual_cache.misses == 2


def test_precision_belongs_to_the_name():
    tower, name = torch.nn.Linear(2, 2), TowerName()
    plain = name.of(tower)
    with torch.autocast("cpu", torch.bfloat16):
        assert name.of(tower) != plain
    assert name.of(tower) == plain
    half = name.of(tower.bfloat16())
    assert half != plain
    # Mixed precision has kernels that run in single.
    with torch.autocast("cpu", torch.bfloat16):
        assert name.of(tower) != half


def test_what_was_not_used_for_longest_goes_first():
    model = cached("qwen2_5_vl")
    rng = np.random.default_rng(0)
    views = [random_view(rng, model.view_maker) for _ in range(4)]
    one = model.encode(views[:1]).embeds.nbytes
    model.visual_cache = cache = VisualCache(2.5 * one / 2**20)
    for view in (views[0], views[1], views[0], views[2]):
        model.encode([view])
    assert cache.misses == 3
    model.encode([views[0]])
    assert cache.misses == 3
    model.encode([views[1]])
    assert cache.misses == 4
    # More at once than can be kept is still encoded, each where it belongs.
    together = model.encode(views)
    torch.testing.assert_close(
        together.embeds[together.rows[views[3].hash]], model.encode(views[3:]).embeds
    )


def test_a_cache_without_room_is_a_mistake():
    with pytest.raises(ValueError, match="visual_cache=null"):
        VisualCache(0)


def test_a_tower_with_adapters_is_not_cached():
    model = cached("qwen3_vl")
    config = LoraConfig(r=2, target_modules=r".*visual.*qkv")
    adapted = VisionLanguageModel(
        get_peft_model(model.model, config).requires_grad_(False),
        model.view_maker,
        model.visual_cache,
    )
    view = random_view(np.random.default_rng(0), model.view_maker)
    adapted.encode([view])
    assert adapted.visual_cache.misses == 0


def test_a_tower_without_gradient_takes_no_more_at_once_than_a_forward_does(monkeypatch):
    tower, rng = tiny_model("qwen3_vl"), np.random.default_rng(0)
    views = [v for _ in range(5) for v in random_context(rng, tower.view_maker).views]
    whole, taken = tower.encode(views), []
    once = tower._run_tower_once
    monkeypatch.setattr(tower, "_run_tower_once", lambda some: taken.append(some) or once(some))
    most = max(view.num_tokens for view in views)
    monkeypatch.setattr("reframe_vl.policy.model._TOWER_TOKENS", most)
    with torch.no_grad():
        pieces = tower.encode(views)
    assert len(taken) > 1
    assert all(sum(v.num_tokens for v in some) <= most for some in taken)
    assert pieces.rows == whole.rows
    torch.testing.assert_close(pieces.embeds, whole.embeds)
    tower.encode(views)
    assert len(taken[-1]) == len(whole.rows)
