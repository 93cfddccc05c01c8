"""Sharing prefixes changes nothing but the work."""

import copy
import dataclasses
import functools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from reframe_vl.policy import tree_attention
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import _neighbours as neighbours
from reframe_vl.policy.score import score
from reframe_vl.types import Context, Provenance, Span
from tiny import FAMILIES, random_context, random_view, sampling, tiny_model, tokenizer

IMAGE = tokenizer().convert_tokens_to_ids("<|image_pad|>")
HOW = sampling(0.8)


def words(rng, low, high):
    return tuple(int(t) for t in rng.integers(20, 300, int(rng.integers(low, high))))


def sampled(rng, low=1, high=30):
    ids = words(rng, low, high)
    return Span(Provenance.SAMPLED, ids, logprobs=(0.0,) * len(ids))


def observation(rng, maker):
    ids = (*words(rng, 1, 20), IMAGE, *words(rng, 1, 5))
    return Span(Provenance.OBSERVED, ids, views=(random_view(rng, maker),))


def group(rng, maker, size):
    """Rollouts of one prompt: some end at once, some look, some share a turn, some are dropped."""
    images = [random_view(rng, maker) for _ in range(int(rng.integers(0, 3)))]
    ids = words(rng, 20, 60)
    for _ in images:
        ids = (*ids, IMAGE, *words(rng, 1, 9))
    prompt = Span(Provenance.PROMPT, ids, views=tuple(images))
    common = [sampled(rng, 18, 30), observation(rng, maker)]
    contexts = []
    for _ in range(size):
        match int(rng.integers(5)):
            case 0:
                contexts.append(Context([prompt, sampled(rng)]))
            case 1:
                turns = [sampled(rng), observation(rng, maker), sampled(rng)]
                contexts.append(Context([prompt, *turns]))
            case 2:
                contexts.append(Context([prompt, *common, sampled(rng)]))
            case 3:
                call = sampled(rng)
                contexts.append(Context([prompt, call]))
                bare = Span(Provenance.PROMPT, words(rng, 3, 30))
                carried = dataclasses.replace(call, carried=True)
                contexts.append(Context([bare, carried, observation(rng, maker), sampled(rng)]))
            case _:
                contexts.append(Context([prompt]))
    return contexts


def prepared(family, *, lora=False, frozen_vision=False, checkpointing=False):
    model = tiny_model(family)
    if lora:
        targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj|.*in_proj_qkv"
        adapted = get_peft_model(model.model, LoraConfig(r=4, target_modules=targets))
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model = VisionLanguageModel(adapted, model.view_maker)
    if frozen_vision:
        model.visual.requires_grad_(False)
    if checkpointing:
        model.base.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.base.enable_input_require_grads()
    return model.train()


def scored(model, contexts, share):
    """Log-probs and gradients of a loss that weighs every token differently."""
    model.zero_grad(set_to_none=True)
    result = score(model, contexts, HOW, entropy=True, share_prefixes=share)
    weights = torch.linspace(-1, 1, len(result.logprobs_T))
    if len(weights):
        (result.logprobs_T * weights).sum().backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    return result, gradients


def assert_exact(model, contexts):
    plain, expected = scored(model, contexts, share=False)
    shared, found = scored(model, contexts, share=True)
    assert shared.counts == plain.counts == [c.num_trained for c in contexts]
    torch.testing.assert_close(shared.logprobs_T, plain.logprobs_T, atol=1e-5, rtol=0)
    torch.testing.assert_close(shared.entropy_T, plain.entropy_T, atol=1e-4, rtol=0)
    scale = max([float(g.abs().max()) for g in expected.values()], default=0.0)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * scale, name


VARIANTS = [
    {},
    {"checkpointing": True},
    {"frozen_vision": True},
    {"lora": True},
    {"lora": True, "checkpointing": True, "frozen_vision": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "full")
@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_prefixes_changes_neither_logprobs_nor_gradients(family, variant):
    model = prepared(family, **variant)
    assert model.shares_prefixes
    rng = np.random.default_rng(7)
    contexts = [c for _ in range(3) for c in group(rng, model.view_maker, 4)]
    assert_exact(model, contexts)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_kernel_that_reports_log_sum_exps_scoring_is_as_exact(family, monkeypatch):
    monkeypatch.setattr(tree_attention, "_reports_lse", lambda *_: False)
    model = prepared(family)
    rng = np.random.default_rng(7)
    assert_exact(model, [c for _ in range(3) for c in group(rng, model.view_maker, 4)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_keeps_no_graph_although_checkpointing_asks_for_one(family):
    model = prepared(family, lora=True, checkpointing=True, frozen_vision=True)
    view = random_view(np.random.default_rng(0), model.view_maker)
    features = model.encode([view])
    assert not features.embeds.requires_grad
    assert not any(layer.requires_grad for layer in features.deepstack)
    model.visual.requires_grad_(True)
    assert model.encode([view]).embeds.requires_grad


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_runs_with_its_own_weights(family, share):
    model = tiny_model(family)
    contexts = group(np.random.default_rng(0), model.view_maker, 3)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before = score(copied, contexts, sampling(), share_prefixes=share).logprobs_T
        for parameter in model.parameters():
            parameter.mul_(1.3)
        after = score(copied, contexts, sampling(), share_prefixes=share).logprobs_T
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_made_from_the_settings_of_another_shares_prefixes_too(family):
    first = tiny_model(family)
    base = type(first.base)(copy.deepcopy(first.base.config))
    second = VisionLanguageModel(base, first.view_maker)
    assert second.shares_prefixes
    contexts = group(np.random.default_rng(1), second.view_maker, 3)
    with second.inference():
        shared, plain = (
            score(second, contexts, sampling(), share_prefixes=share).logprobs_T
            for share in (True, False)
        )
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [4, 8])
def test_contexts_before_and_after_a_drop_share_their_own_prefixes_in_one_forward(size):
    model = tiny_model("qwen3_vl")
    rng = np.random.default_rng(2)
    prompt, text = words(rng, 400, 401), words(rng, 100, 101)
    contexts = []
    for _ in range(size):
        turn = sampled(rng, 5, 6)
        contexts.append(Context([Span(Provenance.PROMPT, prompt), turn]))
        carried = dataclasses.replace(turn, carried=True)
        contexts.append(Context([Span(Provenance.PROMPT, text), carried, sampled(rng, 5, 6)]))
    rows = [model.expand(context) for context in contexts]
    assert len(list(neighbours(rows, range(len(rows)), 400 + 100 + 20 * size))) == 1


def test_attention_dropout_is_refused(monkeypatch):
    model = prepared("qwen3_vl")
    rng = np.random.default_rng(0)
    for layer in model.language_model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.1)
    with pytest.raises(ValueError, match="attention_dropout"):
        score(model, [random_context(rng, model.view_maker, 1)], HOW)


@pytest.fixture(scope="module")
def models():
    return {family: prepared(family, checkpointing=True) for family in FAMILIES}


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 5))
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_any_shape_are_scored_exactly(models, family, seed, groups, size):
    model = models[family]
    rng = np.random.default_rng(seed)
    assert_exact(model, [c for _ in range(groups) for c in group(rng, model.view_maker, size)])


def test_the_shared_prefix_really_runs_once(monkeypatch):
    model = prepared("qwen3_vl")
    rng = np.random.default_rng(0)
    prompt = random_context(rng, model.view_maker, 1, sizes=((64, 64),)).spans[0]
    contexts = [Context([prompt, sampled(rng, 5, 6)]) for _ in range(8)]
    seen = []
    layer = model.language_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    score(model, contexts, HOW)
    assert seen == [len(prompt) + 8 * 5]


@pytest.mark.parametrize("share", [True, False])
def test_bounded_forwards_give_the_same_scores(share):
    model = prepared("qwen3_vl").eval()
    rng = np.random.default_rng(1)
    contexts = [c for _ in range(3) for c in group(rng, model.view_maker, 5)]
    whole = score(model, contexts, HOW, share_prefixes=share).logprobs_T
    parts = score(
        model, contexts, HOW, share_prefixes=share, max_tokens=80, logits_chunk=7
    ).logprobs_T
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


def test_equal_words_around_other_images_do_not_count_as_shared():
    model = prepared("qwen3_vl")
    rng = np.random.default_rng(0)
    ids = (*words(rng, 20, 21), IMAGE, *words(rng, 20, 21))
    contexts = [
        Context([Span(Provenance.PROMPT, ids, views=(random_view(rng, model.view_maker),))])
        for _ in range(6)
    ]
    for context in contexts:
        context.spans.append(sampled(rng, 3, 4))
    seen = []
    layer = model.language_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    with torch.no_grad():
        score(model, contexts, HOW, max_tokens=100)
    assert max(seen) <= 100


@pytest.mark.parametrize("family", FAMILIES)
def test_bounded_forwards_are_run_again_when_backing_up_and_give_the_same_gradients(
    family, monkeypatch
):
    model = prepared(family)
    rng = np.random.default_rng(1)
    contexts = [c for _ in range(3) for c in group(rng, model.view_maker, 5)]
    runs = []
    model.language_model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    whole, expected = scored(model, contexts, share=True)
    assert len(runs) == 1
    bounded = functools.partial(score, max_tokens=200)
    monkeypatch.setattr(sys.modules[__name__], "score", bounded)
    runs.clear()
    parts, found = scored(model, contexts, share=True)
    forwards = len(runs)
    torch.testing.assert_close(parts.logprobs_T, whole.logprobs_T, atol=1e-5, rtol=0)
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * scale, name
    runs.clear()
    with torch.no_grad():
        score(model, contexts, HOW)
    assert forwards == 2 * len(runs) > 2


def test_bfloat16_is_as_close_as_bfloat16_is():
    full = prepared("qwen3_vl").eval()
    model = copy.deepcopy(full).bfloat16()
    rng = np.random.default_rng(2)
    contexts = group(rng, model.view_maker, 6)
    with torch.no_grad():
        reference = score(full, contexts, HOW).logprobs_T
        shared = score(model, contexts, HOW).logprobs_T
        plain = score(model, contexts, HOW, share_prefixes=False).logprobs_T
    noise = (plain - reference).abs().max()
    assert (shared - reference).abs().max() <= 2 * noise + 1e-2


def test_c08_nothing_to_score_is_an_empty_result():
    model = prepared("qwen3_vl")
    context = random_context(np.random.default_rng(0), model.view_maker, 1)
    result = score(model, [Context(context.spans[:1])], HOW, entropy=True)
    assert result.counts == [0]
    assert len(result.logprobs_T) == len(result.entropy_T) == 0
    assert score(model, [], HOW).counts == []


def test_b09_a_banned_id_in_external_text_has_a_finite_logprob():
    model = prepared("qwen3_vl").eval()
    prompt = random_context(np.random.default_rng(0), model.view_maker, 1).spans[0]
    context = Context([prompt, Span(Provenance.EXTERNAL, (30, IMAGE, 31))])
    assert bool(score(model, [context], HOW).logprobs_T.isfinite().all())
