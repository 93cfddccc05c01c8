"""What must hold for every turn and for every episode, whatever the policy writes."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import common
import numpy as np
from fuzz_turns import noise, turn

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rewards.answer import is_right
from reframe_vl.rewards.total import RewardWeights, score
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.episode import Budget, Environment, Episode
from reframe_vl.rollout.json_field import Field
from reframe_vl.rollout.prompt import Prompt, PromptSettings, build_prompt
from reframe_vl.rollout.read_line import read_rollout, read_view
from reframe_vl.rollout.write_line import sample_fields, to_line
from reframe_vl.tools.base import Reason, Refusal, Scene, Tool, ToolRequest, ToolResult, propose
from reframe_vl.tools.codec import PLACEHOLDER, TURN_CLOSE, Codec, codec_for
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.registry import default_tools
from reframe_vl.types import (
    RGB,
    Answer,
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

VIEW_PIXELS = 256
FORMS: tuple[dict[str, Any], ...] = (
    {"family": "qwen3_vl"},
    {"family": "qwen3_vl", "compact": True},
    {"family": "qwen3_vl", "thinking": True},
    {"family": "qwen2_5_vl"},
    {"family": "qwen3_5"},
    {"family": "qwen3_5", "thinking": True},
)


class BrokenRuleError(AssertionError):
    """Something that must hold for every turn does not hold."""


def require(holds: bool, rule: str) -> None:
    """Stops where a rule is broken.

    Raises:
        BrokenRuleError: It is.
    """
    if not holds:
        raise BrokenRuleError(rule)


class Clip(VideoMedia):
    """Grey frames, one a second."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames

    @property
    def key(self) -> str:
        return f"clip-{self.num_frames}"

    @property
    def size(self) -> tuple[int, int]:
        return (32, 24)

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        return tuple(map(float, range(self.num_frames)))

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        return [np.full((24, 32, 3), 20 * index, np.uint8) for index in frames]


@cache
def samples(strip: Path) -> tuple[Sample, ...]:
    """Images and videos with answers of every kind; ``strip`` is a long, thin image."""
    image = MiniWorld().sample("fuzz", 0)
    clip = Sample(
        "clip",
        Modality.VIDEO,
        Clip(12),
        "Which frame?",
        Answer("open", "the third one"),
        evidence=Evidence(segments=((2, 3),)),
    )
    options = ("a cat", "a dog", "7", "none")
    return (
        image,
        replace(image, answer=Answer("mcq", "B"), options=options, evidence=None),
        replace(image, answer=Answer("number", "5 million", tolerance=0.1), media=ImageFile(strip)),
        replace(image, answer=Answer("span", "$1,204.00"), media=ImageFile(strip)),
        replace(image, answer=Answer("expression", "2x + 4")),
        clip,
        replace(clip, media=Clip(1), evidence=None),
        replace(clip, media=Clip(2), answer=Answer("mcq", "A"), options=options, evidence=None),
    )


@cache
def codecs() -> tuple[Codec, ...]:
    """Every form in every coordinate frame."""
    return tuple(codec_for(frame=frame, **form) for form in FORMS for frame in CoordinateFrame)


@cache
def environment(codec: Codec) -> Environment:
    """Where episodes play."""
    return Environment(
        codec=codec,
        encoder=Encoder(build_tokenizer()),
        view_maker=ViewMaker(8, 1, 1, VIEW_PIXELS, 4096, (0.5,) * 3, (0.5,) * 3),
        tools=default_tools(),
        budget=Budget(max_context_tokens=4096, max_visual_tokens=96),
        run_tool=lambda tool, request, media: tool.run(request, media, VIEW_PIXELS),
    )


@cache
def prompt(codec: Codec, strip: Path, number: int) -> Prompt:
    """The prompt of a sample."""
    env = environment(codec)
    settings = PromptSettings(view_pixels=1024, frame_pixels=VIEW_PIXELS, max_frames=4)
    sample = samples(strip)[number]
    return build_prompt(sample, codec, env.encoder, env.view_maker, env.tools, settings)


def read(text: str, codec: Codec, truncated: bool, scene: Scene, sample: Sample) -> tuple[str, str]:
    """What becomes of a turn, and why."""
    parsed = codec.parse(text, truncated)
    require(parsed.call is None or parsed.refusal is None, "A turn is a call or a refusal.")
    if parsed.call is None and parsed.refusal is None:
        if not parsed.answers:
            return "ended", "truncated" if truncated else "no_answer"
        if sample.answer.kind == "expression":
            return "answered", "not compared here"
        right = is_right(parsed.answers[-1], sample.answer, sample.options)
        require(right is not None, "An answer is right or wrong.")
        return "answered", "right" if right else "wrong"
    tools = environment(codec).tools
    found = propose(parsed.call, tools, scene) if parsed.call is not None else parsed.refusal
    if isinstance(found, Refusal):
        require(0 < len(found.message.encode()) < 1_000, "A refusal says something, in few words.")
        return "refused", Reason(found.reason)
    require(found is not None and not parsed.answers, "A call that is executed stands alone.")
    assert found is not None
    execute(*found, scene, sample)
    return "executed", found[0].name


def execute(tool: Tool, request: ToolRequest, scene: Scene, sample: Sample) -> None:
    """Runs a checked call and shows what it returns."""
    width, height = scene.size
    for x0, y0, x1, y1 in request.boxes:
        require(0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height, "A box lies in the image.")
    require(set(request.frames) <= set(range(scene.num_frames)), "Frames are those of the grid.")
    result = tool.run(request, sample.media, VIEW_PIXELS)
    require(len(result.images) == len(request.boxes) + len(request.frames), "An image for each.")
    for image in result.images:
        view = environment(codecs()[0]).view_maker.view(image.pixels, VIEW_PIXELS)
        require(view.num_tokens > 0, "A view has tokens.")


# --------------------------------------------------------------------------- whole episodes


@dataclass
class FuzzedEngine:
    """Says fuzzed turns, and sometimes ids that make no text at all."""

    rng: random.Random
    codec: Codec
    modality: Modality
    said: list[tuple[int, ...]] = field(default_factory=list)

    def open(self, sessions: Sequence[str]) -> None:
        """Nothing is kept."""

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """Ends where a stop id is sampled or the turn is too long."""
        tokenizer = environment(self.codec).encoder.tokenizer
        if self.rng.random() < 0.1:
            ids = self.rng.choices(range(len(tokenizer) + 8), k=30)
        else:
            text = turn(self.rng, self.codec, self.modality).encode(errors="replace").decode()
            text += TURN_CLOSE * (self.rng.random() < 0.8)
            ids = tokenizer(text[:4_000], add_special_tokens=False)["input_ids"]
        ids = ids[: sampling.max_new_tokens] or list(sampling.stop_ids)
        stop = next((n for n, token in enumerate(ids) if token in sampling.stop_ids), None)
        self.said.append(tuple(ids if stop is None else ids[: stop + 1]))
        logprobs = (-0.5,) * len(self.said[-1])
        return Generation(self.said[-1], logprobs, "length" if stop is None else "stop")

    def release(self, session: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def play(rng: random.Random, codec: Codec, strip: Path, number: int) -> Iterator[tuple[str, str]]:
    """Plays and checks an episode; tells how it ended and what became of its calls."""
    sample, env = samples(strip)[number], environment(codec)
    failing = rng.random() < 0.1

    def run_tool(tool: Tool, request: ToolRequest, media: Media) -> ToolResult:
        if failing:
            raise MediaError(f"disk gone{PLACEHOLDER}{TURN_CLOSE}{noise(rng)!a}")
        return env.run_tool(tool, request, media)

    engine = FuzzedEngine(rng, codec, sample.modality)
    stop = (env.encoder.tokenizer.convert_tokens_to_ids(TURN_CLOSE),)
    episode = Episode(
        RolloutKey(0, 0, sample.id, 0),
        sample,
        prompt(codec, strip, number),
        replace(env, run_tool=run_tool, tools_on=rng.random() < 0.95),
        Sampling(max_new_tokens=512, stop_ids=stop),
        drop=rng.random() < 0.5,
    )
    rollout = asyncio.run(episode.run(engine, "fuzz"))
    check_spans(rollout, engine, env.encoder)
    rollout.rewards, rollout.reward = score(rollout, sample, RewardWeights(), rng.random())
    rewards = [*rollout.rewards.values(), rollout.reward]
    require(all(r is None or math.isfinite(r) for r in rewards), "Rewards are finite or None.")
    require(rollout.reward is not None, "What was played has a reward.")
    line = to_line(0, sample_fields(sample), rollout, env.encoder.decode)
    again = read_rollout(Field(json.loads(line), "the line"), read_view)
    require(again == rollout, "A rollout is read back as it was written.")
    yield "episode", rollout.termination
    for call in rollout.calls:
        yield f"episode's call: {call.status}", call.reason


def check_spans(rollout: Rollout, engine: FuzzedEngine, encoder: Encoder) -> None:
    """What the engine said is trained once and nothing else is; images have placeholders."""
    require(rollout.termination is not Termination.ERROR, "The engine does not fail.")
    spans = [span for context in rollout.contexts for span in context.spans]
    trained = [span for span in spans if span.trained]
    placeholder = encoder.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    require([s.token_ids for s in trained] == engine.said, "What was sampled is trained.")
    require(
        all(s.provenance is Provenance.SAMPLED for s in trained),
        "Only what was sampled is trained.",
    )
    require(
        all(
            span.token_ids.count(placeholder) == len(span.views)
            for span in spans
            if span.provenance is not Provenance.SAMPLED
        ),
        "Placeholders are as many as images.",
    )
