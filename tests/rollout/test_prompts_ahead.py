"""Prompts that are built before they are asked for."""

from __future__ import annotations

import threading

import pytest

from reframe_vl.data.media import MediaError
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.prompt import Prompt, PromptSettings, build_prompt
from reframe_vl.rollout.prompts_ahead import PromptsAhead
from reframe_vl.tools.codec import codec_for
from scripted import sample
from tiny import tokenizer, view_maker


class Builder:
    def __init__(self, prompt):
        self.prompt, self.threads, self.broken = prompt, [], False

    def __call__(self, sample) -> Prompt:
        self.threads.append(threading.current_thread())
        if self.broken:
            raise MediaError(f"{sample.id} is damaged.")
        return self.prompt


@pytest.fixture
def samples():
    return [sample(index) for index in range(3)]


@pytest.fixture
def builder():
    parts = (codec_for("qwen3_vl"), Encoder(tokenizer()), view_maker(), [], PromptSettings())
    return Builder(build_prompt(sample(), *parts))


def test_a_begun_prompt_is_built_once_and_in_another_thread(builder, samples):
    ahead = PromptsAhead(builder)
    ahead.begin(samples[:2])
    for asked in samples:
        assert ahead.take(asked) is builder.prompt
    ahead.close()
    main = threading.current_thread()
    assert [thread is main for thread in builder.threads].count(True) == 1
    assert len(builder.threads) == 3


def test_a_failure_reaches_whoever_takes_the_prompt(builder, samples):
    builder.broken = True
    ahead = PromptsAhead(builder)
    ahead.begin(samples)
    with pytest.raises(MediaError, match="is damaged"):
        ahead.take(samples[0])
    ahead.close()


def test_closed_prompts_are_still_built(builder, samples):
    ahead = PromptsAhead(builder)
    ahead.begin(samples)
    ahead.close()
    ahead.close()
    assert ahead.take(samples[1]) is builder.prompt
