import asyncio
import dataclasses

import numpy as np
import pytest

from reframe_vl.policy.loading import load_policy
from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_request import ExpansionError
from reframe_vl.types import Context, Provenance, Span
from tiny import random_context, sampling
from vllm_models import agree, changed, play, prompt_of, sampled, write_checkpoint


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def engine(request, tmp_path_factory, make_engine):
    if not request.param:
        return request.getfixturevalue("colocated")
    folder = write_checkpoint(tmp_path_factory.mktemp("tied") / "model", tied=True)
    return make_engine(load_policy(folder).model)


def test_g02_g03_after_syncs_it_is_as_it_was_freshly_loaded(engine, loop):
    how, model = sampling(max_new_tokens=6), engine.model
    before = {name: value.clone() for name, value in model.base.state_dict().items()}
    fresh = loop.run(play(engine, how, together=False))
    agree(model, fresh, how)
    loop.run(engine.sync(changed(model, 1), 1))
    other = loop.run(play(engine, how))
    agree(model, other, how)
    assert sampled(other) != sampled(fresh)
    model.base.load_state_dict(before)
    loop.run(engine.sync(model, 2))
    again = loop.run(play(engine, how, together=False))
    assert sampled(again) == sampled(fresh)


def test_g02_a_cached_prefix_of_old_weights_is_forgotten(colocated, loop):
    model, how = colocated.model, sampling(max_new_tokens=8)
    words = np.random.default_rng(0).integers(20, 300, 400)
    prompt = Span(Provenance.PROMPT, tuple(int(word) for word in words))

    def turns():
        contexts = []
        for seed in range(8):
            turn = loop.run(colocated.generate("x", Context([prompt]), how, seed=seed))
            span = Span(Provenance.SAMPLED, turn.token_ids, logprobs=turn.logprobs)
            contexts.append(Context([prompt, span]))
        return contexts

    agree(model, turns(), how)
    loop.run(colocated.sync(changed(model, 3), 1))
    agree(model, turns(), how)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_c10_b14_trainer_logprobs_equal_the_samplers(engine, loop, temperature):
    how = sampling(temperature, max_new_tokens=6)
    contexts = loop.run(play(engine, how, seed=5))
    agree(engine.model, contexts, how)
    blank = [
        Context(
            [
                dataclasses.replace(
                    span,
                    views=tuple(
                        engine.model.view_maker.view(np.full_like(v.pixels, 128))
                        for v in span.views
                    ),
                )
                for span in context.spans
            ]
        )
        for context in contexts
    ]
    with pytest.raises(AssertionError):
        agree(engine.model, blank, how, tolerance=1e-2)


def test_b09_banned_ids_are_never_drawn_and_stop_ids_end_turns(colocated, loop):
    how = sampling(max_new_tokens=40)
    prompt = prompt_of(colocated.model)

    async def many():
        return await asyncio.gather(
            *[colocated.generate(str(i), prompt, how, seed=i) for i in range(64)]
        )

    turns = loop.run(many())
    drawn = [token for turn in turns for token in turn.token_ids]
    # By chance a tenth of so random a model's tokens would be.
    assert len(drawn) > 500 and not set(drawn) & set(how.banned_ids)
    for turn in turns:
        assert (turn.finish == "stop") == (turn.token_ids[-1] in how.stop_ids)
        assert len(turn.token_ids) == len(turn.logprobs) <= 40
    assert {turn.finish for turn in turns} == {"stop", "length"}


def test_a_seed_decides_a_turn_whatever_is_under_way(colocated, loop):
    how, prompt = sampling(max_new_tokens=12), prompt_of(colocated.model)

    async def together():
        jobs = [colocated.generate(str(i), prompt, how, seed=i) for i in range(6)]
        return [turn.token_ids for turn in await asyncio.gather(*jobs)]

    async def alone(seed):
        return (await colocated.generate("x", prompt, how, seed=seed)).token_ids

    first = loop.run(together())
    assert len(set(first)) > 3
    assert [loop.run(alone(seed)) for seed in range(6)] == first


def test_a_cancelled_turn_is_dropped_in_the_engine_too(colocated, loop):
    how = dataclasses.replace(sampling(max_new_tokens=400), stop_ids=())

    async def cancel():
        task = asyncio.ensure_future(
            colocated.generate("x", prompt_of(colocated.model), how, seed=0)
        )
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        return colocated.backend._llm.get_num_unfinished_requests()

    assert loop.run(cancel()) == 0


def test_b08_images_of_another_size_than_the_trainers_are_noticed(colocated, loop):
    prompt = prompt_of(colocated.model)
    [span] = prompt.spans
    [view] = span.views
    wrong = dataclasses.replace(view, num_tokens=view.num_tokens + 1, grid_thw=(1, 2, 8))
    with pytest.raises(ExpansionError, match="image tokens by the trainer"):
        loop.run(
            colocated.generate(
                "x", Context([dataclasses.replace(span, views=(wrong,))]), sampling(), seed=0
            )
        )


def test_a_prompt_that_is_too_long_fails_one_rollout_and_not_the_engine(colocated, loop):
    long = random_context(np.random.default_rng(0), colocated.model.view_maker, 60, (9, 12))
    with pytest.raises(EngineError, match="refused"):
        loop.run(colocated.generate("x", Context(long.spans[:-1]), sampling(), seed=0))
    loop.run(colocated.generate("x", prompt_of(colocated.model), sampling(), seed=0))
