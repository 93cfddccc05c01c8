"""How a base checkpoint comes to know the format and to use its tool weakly.

Three stages: the vision tower learns to see with throw-away heads, the whole model learns the
format by imitation, and a last stage *weakens* it on purpose: it often answers at once, places
most boxes badly when it samples, and after a call mostly repeats what the cue says. Reinforcement
learning has something to improve, and a shortcut to fall for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from reframe_vl.mini.lessons import LessonWriter, draw_box, evidence_box, mini_image
from reframe_vl.mini.vision_training import SPLIT, VisionStage, set_learning_rate
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import score
from reframe_vl.types import Context, Sampling

logger = logging.getLogger(__name__)

ANSWER_WEIGHT = 5.0
"""Loss weight of an answer's digit against any other token: there is one of them in a lesson."""


@dataclass(frozen=True)
class Curriculum:
    """What the lessons of a stage are.

    Attributes:
        direct: Share of answers without a call.
        look: Share of calls with an answer after them.
        dropped: Share of answers from a crop alone.
        caption: Share of captions.
        exact: Of the boxes called for, those that are the evidence.
        jittered: Those that are off by at most a unit on each side; the rest are random.
        cue_label: Of the answers after a call with the original in view, those that repeat the
            cue's digit instead of the right one. A bias put in on purpose.
    """

    direct: float
    look: float
    dropped: float
    caption: float
    exact: float
    jittered: float
    cue_label: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One stage of imitation."""

    world: MiniWorld
    curriculum: Curriculum
    steps: int
    learning_rate: float
    batch_size: int = 96


VISION = VisionStage(MiniWorld(n_objects=3))
FORMAT = Stage(
    MiniWorld(n_objects=3),
    Curriculum(direct=0.15, look=0.2, dropped=0.05, caption=0.6, exact=0.9, jittered=0.1),
    steps=400,
    learning_rate=3e-3,
)
WEAKENING = Stage(
    MiniWorld(n_objects=1),
    Curriculum(
        direct=0.45,
        look=0.44,
        dropped=0.08,
        # A few stay, so that reinforcement learning can bring locating back.
        caption=0.03,
        exact=0.0,
        jittered=0.1,
        cue_label=0.6,
    ),
    steps=120,
    learning_rate=1e-3,
)

DROPPED_BOXES = (0.5, 0.3)
"""Exact and jittered boxes of answers from a crop alone."""


def train_stage(
    model: VisionLanguageModel, writer: LessonWriter, stage: Stage, rng: np.random.Generator
) -> None:
    """Imitates lessons of a stage, in place."""
    answer_id = writer.encoder.tokenizer.convert_tokens_to_ids("<answer>")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(stage.steps):
        set_learning_rate(optimizer, stage.learning_rate, step, stage.steps, decay=0.3)
        lessons = [
            write_lesson(writer, stage.world, stage.curriculum, rng)
            for _ in range(stage.batch_size)
        ]
        logprobs = score(model, lessons, Sampling()).logprobs_T
        weights = torch.tensor([w for c in lessons for w in token_weights(c, answer_id)])
        loss = -(weights * logprobs).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 40 == 0:
            logger.info("imitation %d/%d: loss %.3f", step + 1, stage.steps, loss.item())


def write_lesson(
    writer: LessonWriter, world: MiniWorld, curriculum: Curriculum, rng: np.random.Generator
) -> Context:
    """Draws a scene and a lesson about it."""
    sample = world.sample(SPLIT, int(rng.integers(1 << 40)))
    c = curriculum
    kind = rng.choice(4, p=(c.direct, c.look, c.dropped, c.caption))
    if kind == 0:
        return writer.answer_at_once(sample)
    if kind == 1:
        box = draw_box(evidence_box(sample), c.exact, c.jittered, rng)
        follows_cue = rng.random() < c.cue_label
        digit = str(mini_image(sample).cue_digit) if follows_cue else sample.answer.value
        return writer.look_and_answer(sample, box, digit)
    if kind == 2:
        return writer.answer_from_crop(sample, draw_box(evidence_box(sample), *DROPPED_BOXES, rng))
    return writer.caption(sample)


def token_weights(context: Context, answer_id: int) -> list[float]:
    """The loss weight of each trained token: more for the digit after ``<answer>``."""
    trained = [t for span in context.spans if span.trained for t in span.token_ids]
    return [ANSWER_WEIGHT if before == answer_id else 1.0 for before in [-1, *trained[:-1]]]
