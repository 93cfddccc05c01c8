import asyncio
import os
import signal

import numpy as np
import pytest

from reframe_vl.policy.loading import load_policy
from reframe_vl.policy.score import score
from reframe_vl.rollout.vllm_engine import VLLMEngine
from reframe_vl.rollout.vllm_launch import LaunchedVLLM
from reframe_vl.rollout.vllm_teacher import ServedTeacher
from tiny import random_context, sampling
from vllm_models import ARGUMENTS, CPU, agree, changed, play, sampled


@pytest.fixture(scope="module")
def launched(checkpoint, make_engine):
    """An engine behind a server of its own."""
    return make_engine(load_policy(checkpoint).model, launch=True)


@pytest.fixture(scope="module")
def teacher(checkpoint, loop):
    """A server that prefills in small chunks."""
    chunked = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_chunked_prefill": True}
    server = LaunchedVLLM({"model": str(checkpoint), "dtype": "float32", **ARGUMENTS, **chunked})
    loop.run(server.start())
    yield server
    server.stop()


def test_turns_of_a_server_are_the_trainers_before_and_after_a_sync(launched, loop):
    how = sampling(0.8, max_new_tokens=6)
    fresh = loop.run(play(launched, how, together=False))
    agree(launched.model, fresh, how)
    before = {n: v.clone() for n, v in launched.model.base.state_dict().items()}
    loop.run(launched.sync(changed(launched.model, 1), 1))
    other = loop.run(play(launched, how))
    agree(launched.model, other, how)
    assert sampled(other) != sampled(fresh)
    launched.model.base.load_state_dict(before)
    loop.run(launched.sync(launched.model, 2))
    again = loop.run(play(launched, how, together=False))
    assert sampled(again) == sampled(fresh)


def test_a_server_that_runs_already_is_used_and_left_running(launched, loop, tmp_path):
    engine = VLLMEngine(launched.model, url=launched.backend.url, weights_folder=str(tmp_path))
    how = sampling(max_new_tokens=6)
    loop.run(engine.start(CPU))
    loop.run(engine.sync(launched.model, 7))
    agree(launched.model, loop.run(play(engine, how)), how)
    engine.close()
    assert loop.run(launched.backend.is_up())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_served_teacher_scores_as_one_in_this_process(teacher, checkpoint, temperature):
    model, how = load_policy(checkpoint).model, sampling(temperature)
    rng = np.random.default_rng(3)
    sizes = ((64, 64), (32, 48))
    contexts = [random_context(rng, model.view_maker, 1 + i % 5, (2, 9), sizes) for i in range(8)]
    contexts.append(random_context(rng, model.view_maker, 2, images=False))
    with model.inference():
        expected = score(model, contexts, how).per_context()
    found = ServedTeacher(teacher.url, model).log_probs(contexts, how)
    assert max(len(context) for context in contexts) > 64, "prefilled in several chunks"
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-4)


@pytest.mark.long
def test_a_server_killed_in_mid_step_costs_no_sample(launched, loop, monkeypatch):
    how = sampling(max_new_tokens=30)
    loop.run(launched.sync(changed(launched.model, 5), 11))
    undisturbed = loop.run(play(launched, how, count=12))
    first, asked, generate = launched.backend.process.pid, [], launched.backend.generate

    async def killing(request):
        asked.append(request)
        if len(asked) == 6:
            os.kill(first, signal.SIGKILL)
        return await generate(request)

    monkeypatch.setattr(launched.backend, "generate", killing)
    contexts = loop.run(play(launched, how, count=12))
    assert len(asked) > 12, "some were asked again"
    assert launched.backend.process.pid != first
    assert len(contexts) == len(undisturbed)
    # The new server has the weights of the last sync, not those of the checkpoint.
    agree(launched.model, contexts, how)


@pytest.mark.long
def test_an_unreachable_server_that_comes_back_gets_the_weights_again(launched, loop, tmp_path):
    engine = VLLMEngine(launched.model, url=launched.backend.url, weights_folder=str(tmp_path))
    how = sampling(max_new_tokens=6)
    loop.run(engine.start(CPU))
    loop.run(engine.sync(changed(launched.model, 6), 1))
    os.kill(launched.backend.process.pid, signal.SIGKILL)
    launched.backend.process.wait()

    async def both():
        playing = asyncio.ensure_future(play(engine, how))
        await asyncio.sleep(1.0)
        await launched.backend.start()
        return await playing

    agree(launched.model, loop.run(both()), how)
    engine.close()
