import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from reframe_vl.policy.score import score
from reframe_vl.rollout.hf_engine import HFEngine, draw
from reframe_vl.types import Context, Provenance, Span
from tiny import FAMILIES, random_context, random_view, sampling, tiny_model, tokenizer


def observation(rng, model):
    image = tokenizer().convert_tokens_to_ids("<|image_pad|>")
    ids = [int(t) for t in rng.integers(20, 300, int(rng.integers(1, 4)))]
    return Span(Provenance.OBSERVED, (*ids, image, 21), views=(random_view(rng, model.view_maker),))


async def play(engine, rng, prompts, turns, how, drop=()):
    """Rollouts of several turns, as coroutines."""
    names = [f"s{i}" for i in range(len(prompts))]
    engine.open(names)
    observations = [[observation(rng, engine.model) for _ in range(turns)] for _ in prompts]

    async def one(i):
        contexts = [Context(list(prompts[i].spans))]
        for turn in range(turns if i % 3 else 1):
            result = await engine.generate(names[i], contexts[-1], how, seed=100 * i + turn)
            span = Span(Provenance.SAMPLED, result.token_ids, logprobs=result.logprobs)
            contexts[-1].spans.append(span)
            if i in drop and turn == 0:
                carried = dataclasses.replace(span, carried=True)
                contexts.append(Context([Span(Provenance.PROMPT, (30, 31, 32)), carried]))
            if turn + 1 < turns:
                contexts[-1].spans.append(observations[i][turn])
        engine.release(names[i])
        return contexts

    return await asyncio.gather(*[one(i) for i in range(len(prompts))])


def rollouts(family, how, turns=3, drop=(1, 4), seed=0):
    model = tiny_model(family)
    rng = np.random.default_rng(seed)
    groups = [random_context(rng, model.view_maker, 1) for _ in range(3)]
    prompts = [Context(g.spans[:1]) for g in groups for _ in range(3)]
    engine = HFEngine(model)
    return model, [c for r in asyncio.run(play(engine, rng, prompts, turns, how, drop)) for c in r]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_c10_b14_trainer_logprobs_equal_the_samplers_over_turns_images_and_drops(
    family, temperature
):
    how = sampling(temperature)
    model, contexts = rollouts(family, how)
    result = score(model, contexts, how, entropy=True)
    sampled = [x for c in contexts for s in c.spans if s.trained for x in s.logprobs]
    assert len(sampled) > 50
    torch.testing.assert_close(result.logprobs_T, torch.tensor(sampled), atol=1e-4, rtol=0)
    assert bool((result.entropy_T >= 0).all())
    blank = [
        Context(
            [
                dataclasses.replace(
                    s,
                    views=tuple(
                        model.view_maker.view(np.full_like(v.pixels, 128)) for v in s.views
                    ),
                )
                for s in c.spans
            ]
        )
        for c in contexts
    ]
    blanked = score(model, blank, how)
    assert (blanked.logprobs_T - result.logprobs_T).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_results_do_not_depend_on_who_shares_the_batch(family):
    how = sampling()
    model = tiny_model(family)
    rng = np.random.default_rng(3)
    prompts = [random_context(rng, model.view_maker, 1) for _ in range(4)]
    prompts = [Context(p.spans[:1]) for p in prompts]

    async def alone(i):
        engine = HFEngine(model)
        engine.open(["x"])
        return (await engine.generate("x", prompts[i], how, seed=i)).token_ids

    async def together(order):
        engine = HFEngine(model, max_batch_size=3)
        engine.open([str(i) for i in order])
        calls = [engine.generate(str(i), prompts[i], how, seed=i) for i in order]
        return dict(zip(order, [r.token_ids for r in await asyncio.gather(*calls)], strict=True))

    first, second = asyncio.run(together([0, 1, 2, 3])), asyncio.run(together([2, 0, 3, 1]))
    assert first == second
    assert [first[i] for i in range(4)] == [asyncio.run(alone(i)) for i in range(4)]


def test_a_groups_prompt_runs_once_and_turns_extend_the_cache(monkeypatch):
    model = tiny_model("qwen3_vl")
    widths = []
    plain = model.hidden_states

    def watched(batch, features, **kwargs):
        widths.append(tuple(batch.ids.shape))
        return plain(batch, features, **kwargs)

    monkeypatch.setattr(model, "hidden_states", watched)
    rng = np.random.default_rng(0)
    prompt = Context(random_context(rng, model.view_maker, 1, sizes=((64, 64),)).spans[:1])
    engine = HFEngine(model)
    how = sampling(max_new_tokens=2)
    asyncio.run(play(engine, rng, [prompt] * 4, 2, dataclasses.replace(how, stop_ids=())))
    prefills = [shape for shape in widths if shape[1] > 1]
    assert prefills[0] == (1, len(prompt))
    # The second turn feeds the last sampled token and the observation, never the prompt.
    assert all(shape[1] < len(prompt) for shape in prefills[1:])


def test_draw_inverts_the_distribution_and_never_returns_a_banned_id():
    how = sampling()
    logits = torch.randn(1, 384, generator=torch.Generator().manual_seed(0)) * 3
    grid = (torch.arange(200_000) + 0.5) / 200_000
    tokens, logprobs = draw(logits.expand(len(grid), -1), how, grid)
    assert not set(tokens.tolist()) & set(how.banned_ids)
    counts = torch.bincount(tokens, minlength=384) / len(grid)
    expected = torch.zeros(384).index_put((tokens,), logprobs.exp())
    torch.testing.assert_close(counts, expected, atol=1e-4, rtol=0)
    edges, _ = draw(logits.expand(2, -1), how, torch.tensor([0.0, 1.0]))
    assert not set(edges.tolist()) & set(how.banned_ids)


def test_a_failing_forward_reaches_the_caller_and_leaves_nobody_waiting(monkeypatch):
    model = tiny_model("qwen3_vl")
    monkeypatch.setattr(model, "encode", lambda views: 1 / 0)
    prompt = random_context(np.random.default_rng(0), model.view_maker, 1)
    engine = HFEngine(model)
    engine.open(["a", "b"])

    async def run():
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(engine.generate(name, prompt, sampling(), seed=0))

    with pytest.raises(ExceptionGroup) as failure:
        asyncio.run(asyncio.wait_for(run(), 10))
    assert any(isinstance(e, ZeroDivisionError) for e in failure.value.exceptions)
