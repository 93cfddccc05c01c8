from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz_text import CODECS, turns
from reframe_vl.data.media import MediaError
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.episode import Budget, Environment, Episode
from reframe_vl.rollout.json_field import Field
from reframe_vl.rollout.prompt import Prompt, PromptSettings, build_prompt
from reframe_vl.rollout.read_line import read_rollout, read_view
from reframe_vl.rollout.write_line import sample_fields, to_line
from reframe_vl.tools.base import Tool, ToolRequest, ToolResult
from reframe_vl.tools.codec import PLACEHOLDER, Codec
from reframe_vl.tools.registry import default_tools
from reframe_vl.types import (
    RGB,
    Answer,
    Applicability,
    CallStatus,
    Context,
    Evidence,
    Media,
    Modality,
    Provenance,
    Rollout,
    RolloutKey,
    Sample,
    Sampling,
    Termination,
    VideoMedia,
)
from scripted import END, ScriptedEngine
from tiny import tokenizer

# The run-time checker of annotations draws which items of a list it looks at, in strategies too.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

TOOLS = default_tools()
MAKER = ViewMaker(8, 1, 1, 256, 4096, (0.5,) * 3, (0.5,) * 3)
MAX_NEW_TOKENS = 300


class Clip(VideoMedia):
    key, size, timestamps_s = "clip", (32, 24), tuple(0.5 * i for i in range(6))

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        return [np.full((24, 32, 3), 40 * index, np.uint8) for index in frames]


IMAGE = MiniWorld().sample("fuzz", 0)
SAMPLES = (
    IMAGE,
    dataclasses.replace(
        IMAGE, options=("a cat", "a dog", "7", "none"), answer=Answer("mcq", "B"), evidence=None
    ),
    Sample(
        "clip",
        Modality.VIDEO,
        Clip(),
        "Which frame?",
        Answer("open", "the third one", aliases=("3",)),
        evidence=Evidence(segments=((2, 3),)),
        applicability=Applicability.NON_BENEFICIAL,
    ),
)


class FuzzedEngine(ScriptedEngine):
    """Says texts, or ids as they are, and cuts what is too long."""

    def __init__(self, *lines: str | tuple[int, ...]) -> None:
        super().__init__(*lines)
        self.said: list[tuple[int, ...]] = []

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        line = self.lines[len(self.said) % len(self.lines)]
        if isinstance(line, str):
            # What comes out of a tokenizer is never half a character.
            line = line.encode(errors="replace").decode()
            line = tuple(tokenizer()(line, add_special_tokens=False)["input_ids"])
        stop = next((n for n, token in enumerate(line) if token in sampling.stop_ids), len(line))
        ids = line[: min(stop + 1, sampling.max_new_tokens)] or sampling.stop_ids
        self.said.append(ids)
        finish = "stop" if ids[-1] in sampling.stop_ids else "length"
        return Generation(ids, (-0.5,) * len(ids), finish)


def run_tool(tool: Tool, request: ToolRequest, media: Media) -> ToolResult:
    if request.frames[:1] == (1,):
        raise MediaError(f"disk gone{PLACEHOLDER}{END}")
    return tool.run(request, media, 1024)


@cache
def environment(codec: Codec) -> Environment:
    budget = Budget(max_turns=4, max_context_tokens=4096, max_visual_tokens=200, max_refusals=3)
    return Environment(codec, Encoder(tokenizer()), MAKER, TOOLS, budget, run_tool)


@cache
def prompt(codec: Codec, number: int) -> Prompt:
    settings = PromptSettings(view_pixels=1024, frame_pixels=256, max_frames=3)
    encoder = environment(codec).encoder
    return build_prompt(SAMPLES[number], codec, encoder, MAKER, TOOLS, settings)


def play(
    codec: Codec, number: int, lines: Sequence[str | tuple[int, ...]], drop: bool
) -> tuple[Rollout, FuzzedEngine]:
    engine = FuzzedEngine(*lines)
    stop = (tokenizer().convert_tokens_to_ids(END),)
    episode = Episode(
        RolloutKey(0, 1, SAMPLES[number].id, 0),
        SAMPLES[number],
        prompt(codec, number),
        environment(codec),
        Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_ids=stop),
        drop=drop,
    )
    return asyncio.run(episode.run(engine, "fuzz")), engine


def check_masks(rollout: Rollout, engine: FuzzedEngine) -> None:
    """Exactly what the engine said is trained, once, and images have their placeholders."""
    trained = [s for c in rollout.contexts for s in c.spans if s.trained]
    assert [s.token_ids for s in trained] == engine.said
    assert all(s.provenance is Provenance.SAMPLED for s in trained)
    assert all(s.logprobs is not None and len(s.logprobs) == len(s.token_ids) for s in trained)
    assert rollout.num_turns == len(engine.said)
    image = tokenizer().convert_tokens_to_ids(PLACEHOLDER)
    for context in rollout.contexts:
        assert context.spans[0].provenance is Provenance.PROMPT
        for before, span in zip(context.spans, context.spans[1:], strict=False):
            assert {before.provenance, span.provenance} & {Provenance.SAMPLED}
            assert (span.provenance is Provenance.OBSERVED) or not span.views
        for span in context.spans:
            if span.provenance is not Provenance.SAMPLED:
                assert span.token_ids.count(image) == len(span.views)
        assert len(context) <= 4096
        assert context.num_visual_tokens <= 200


def check_rewards(rollout: Rollout, sample: Sample) -> None:
    rollout.rewards, rollout.reward = score(rollout, sample, RewardWeights(), 0.5)
    assert rollout.reward is not None and math.isfinite(rollout.reward)
    assert rollout.rewards["answer"] in (0.0, 1.0)
    assert all(value is None or abs(value) <= 1 for value in rollout.rewards.values())
    assert (rollout.rewards["grounding"] is None) or sample.evidence is not None


def check_record(rollout: Rollout, sample: Sample) -> None:
    line = to_line(3, sample_fields(sample), rollout, tokenizer().decode)
    assert line.isascii() and "\n" not in line
    assert read_rollout(Field(json.loads(line), "a line"), read_view) == rollout


ids = st.lists(st.integers(0, 383), min_size=1, max_size=40).map(tuple)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Codec, list[str | tuple[int, ...]]]:
    codec = draw(st.sampled_from(CODECS))
    end = st.sampled_from((END, ""))
    texts = st.builds(str.__add__, turns(codec), end)
    return codec, draw(st.lists(texts | texts | texts | ids, min_size=1, max_size=4))


def test_b13_b17_any_sampled_turns_give_a_rollout_that_is_masked_scored_and_recorded() -> None:
    ends: set[Termination] = set()
    statuses: set[CallStatus] = set()

    @settings(max_examples=120)
    @given(scripts(), st.sampled_from(range(len(SAMPLES))), st.booleans())
    def run(script: tuple[Codec, list[str | tuple[int, ...]]], number: int, drop: bool) -> None:
        codec, lines = script
        rollout, engine = play(codec, number, lines, drop)
        assert rollout.termination is not Termination.ERROR
        assert not rollout.error
        assert rollout.dropped is (drop and any(call.succeeded for call in rollout.calls))
        assert all(call.reason for call in rollout.calls if call.status is CallStatus.REFUSED)
        check_masks(rollout, engine)
        check_rewards(rollout, SAMPLES[number])
        check_record(rollout, SAMPLES[number])
        ends.add(rollout.termination)
        statuses.update(call.status for call in rollout.calls)

    run()
    # The scripts lead to both sides of the border.
    assert ends >= {Termination.ANSWERED, Termination.NO_ANSWER, Termination.TRUNCATED}
    assert statuses >= {CallStatus.OK, CallStatus.REFUSED}


@pytest.mark.parametrize("number", range(len(SAMPLES)))
@pytest.mark.parametrize("codec", CODECS[::3])
def test_b09_a_sampled_placeholder_is_never_an_image(codec: Codec, number: int) -> None:
    line = tokenizer()(PLACEHOLDER * 3 + "<answer>7</answer>", add_special_tokens=False)
    rollout, engine = play(codec, number, [tuple(line["input_ids"])], False)
    [context] = rollout.contexts
    assert context.spans[-1].views == ()
    assert len(context.spans[-1]) == len(engine.said[0])
    check_record(rollout, SAMPLES[number])


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_ids_that_no_token_has_are_kept_and_read_as_nothing(number: int) -> None:
    rollout, _ = play(CODECS[0], number, [(len(tokenizer()) + 5, 3, len(tokenizer()) + 6)], False)
    assert rollout.termination is Termination.TRUNCATED
    check_record(rollout, SAMPLES[number])
