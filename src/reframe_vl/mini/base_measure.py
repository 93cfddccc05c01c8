"""What a base checkpoint can do: reading, locating and calling, each measured by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reframe_vl.mini.glyphs import NUM_DIGITS
from reframe_vl.mini.lessons import TOOLS, LessonWriter, evidence_requests
from reframe_vl.mini.source import World
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.rewards.grounding import pairwise_iou
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.tools.base import Refusal, Scene, ToolRequest, propose
from reframe_vl.tools.codec import BANNED_STRINGS, STOP_STRINGS
from reframe_vl.types import Context, Markup, Provenance, Sample, Sampling, Span

SPLIT = "base_check"

MAX_TURN_TOKENS = 20


@dataclass(frozen=True)
class BaseFigures:
    """Figures of a base checkpoint on one set of samples.

    Attributes:
        no_tool_accuracy: Greedy answers at once.
        oracle_accuracy: Answers after a call for the evidence, the original in view.
        oracle_dropped_accuracy: The same without the original.
        call_rate: Sampled first turns that are a valid call, at temperature 1.
        bad_turn_rate: Sampled first turns that are neither a valid call nor an answer.
        greedy_iou: IoU of the greedy call, once a call is begun, with the evidence; of boxes or
            of sets of frames.
        sampled_iou: Mean IoU of the sampled valid calls.
    """

    no_tool_accuracy: float
    oracle_accuracy: float
    oracle_dropped_accuracy: float
    call_rate: float
    bad_turn_rate: float
    greedy_iou: float
    sampled_iou: float


def measure(
    model: VisionLanguageModel, writer: LessonWriter, world: World, num_scenes: int = 256
) -> BaseFigures:
    """Measures a model on samples that no training sees."""
    samples = [world.sample(SPLIT, index) for index in range(num_scenes)]
    prompts = [writer.prompt(sample) for sample in samples]
    looks = [
        [
            span
            for request in evidence_requests(sample)
            for span in (writer.call(sample, request), writer.observation(sample, request))
        ]
        for sample in samples
    ]
    with_original = [[p, *look] for p, look in zip(prompts, looks, strict=True)]
    alone = [
        [writer.prompt_alone(sample), *look] for sample, look in zip(samples, looks, strict=True)
    ]
    begun = writer.encoder.span([Markup("<tool_call>")], Provenance.OBSERVED)
    sampled = _turns(model, writer, samples, [[p] for p in prompts], temperature=1.0)
    greedy = _turns(model, writer, samples, [[p, begun] for p in prompts], temperature=0.0)
    called = [turn.iou for turn in sampled if turn.iou is not None]
    return BaseFigures(
        no_tool_accuracy=_accuracy(model, writer, samples, [[p] for p in prompts]),
        oracle_accuracy=_accuracy(model, writer, samples, with_original),
        oracle_dropped_accuracy=_accuracy(model, writer, samples, alone),
        call_rate=len(called) / num_scenes,
        bad_turn_rate=sum(t.iou is None and not t.answered for t in sampled) / num_scenes,
        greedy_iou=sum(turn.iou or 0.0 for turn in greedy) / num_scenes,
        sampled_iou=float(np.mean(called)) if called else 0.0,
    )


@dataclass(frozen=True)
class _Turn:
    """A generated first turn.

    Attributes:
        iou: Of a valid call's box with the evidence; None without a valid call.
    """

    iou: float | None
    answered: bool


def _accuracy(
    model: VisionLanguageModel,
    writer: LessonWriter,
    samples: Sequence[Sample],
    histories: Sequence[list[Span]],
) -> float:
    """Share of right digits where the next turn is made to be an answer."""
    opening = writer.encoder.span([Markup("<answer>")], Provenance.OBSERVED)
    with model.inference():
        rows = [model.expand(Context([*history, opening])) for history in histories]
        batch = model.batch(rows)
        hidden = model.hidden_states(batch, model.encode(batch.views))
        last = torch.tensor(batch.lengths) - 1
        logits = model.head(hidden[torch.arange(len(rows)), last])
    ids = [writer.encoder.tokenizer.convert_tokens_to_ids(str(d)) for d in range(NUM_DIGITS)]
    digits = logits[:, ids].argmax(-1).tolist()
    return float(np.mean([str(d) == s.answer.value for d, s in zip(digits, samples, strict=True)]))


def _turns(
    model: VisionLanguageModel,
    writer: LessonWriter,
    samples: Sequence[Sample],
    histories: Sequence[list[Span]],
    temperature: float,
) -> list[_Turn]:
    """Generates one turn after each history and reads it."""
    tokenizer = writer.encoder.tokenizer
    known = tokenizer.get_vocab()
    unused = range(len(tokenizer), model.config.text_config.vocab_size)
    sampling = Sampling(
        temperature=temperature,
        max_new_tokens=MAX_TURN_TOKENS,
        banned_ids=(*(known[t] for t in BANNED_STRINGS if t in known), *unused),
        stop_ids=tuple(known[t] for t in STOP_STRINGS),
    )
    generations = asyncio.run(_generate(HFEngine(model), histories, sampling))
    # A history may end in the opening tag of a call.
    texts = [
        writer.encoder.decode(_begun_turn(history) + generation.token_ids)
        for history, generation in zip(histories, generations, strict=True)
    ]
    return [_read(writer, sample, text) for sample, text in zip(samples, texts, strict=True)]


def _begun_turn(history: list[Span]) -> tuple[int, ...]:
    return tuple(t for span in history[1:] for t in span.token_ids)


async def _generate(
    engine: HFEngine, histories: Sequence[list[Span]], sampling: Sampling
) -> list[Generation]:
    sessions = [str(index) for index in range(len(histories))]
    engine.open(sessions)
    return await asyncio.gather(
        *(
            engine.generate(session, Context(history), sampling, seed=int(session))
            for session, history in zip(sessions, histories, strict=True)
        )
    )


def _read(writer: LessonWriter, sample: Sample, text: str) -> _Turn:
    turn = writer.codec.parse(text, truncated=False)
    if turn.call is None:
        return _Turn(None, bool(turn.answers) and turn.refusal is None)
    scene = Scene.of(sample, writer.codec.frame, sample.media.size)
    proposed = propose(turn.call, [TOOLS[sample.modality]], scene)
    if isinstance(proposed, Refusal):
        return _Turn(None, False)
    return _Turn(_iou(proposed[1], evidence_requests(sample)[0]), False)


def _iou(request: ToolRequest, evidence: ToolRequest) -> float:
    if request.frames:
        asked, shown = set(request.frames), set(evidence.frames)
        return len(asked & shown) / len(asked | shown)
    return float(pairwise_iou(np.array(request.boxes), np.array(evidence.boxes))[0, 0])
