"""How a base checkpoint comes to know the format and to use its tool weakly.

The vision tower learns to see with throw-away heads; the whole model learns the format by
imitation, of images first, then of videos too; and a last stage *weakens* it on purpose: it often
answers at once, places most calls badly when it samples, and after a call often repeats what the
cue says. Reinforcement learning has something to improve, and a shortcut to fall for.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from reframe_vl.mini.lessons import LessonWriter, cue_digit, draw_request
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.vision_training import SPLIT, VisionStage, set_learning_rate
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import score
from reframe_vl.types import Context, Modality, Sampling

logger = logging.getLogger(__name__)

VISION_LR_SCALE = 0.1
"""Learning rate of the vision tower against the rest of the model."""

CHOICE_WEIGHT = 5.0
"""Loss weight of an answer's digit, and of the first frame that a call selects, against any other
token. There is one of them in a lesson; without the weight, frames are not learned from calls."""
CHOICE_OPENINGS = ("<answer>", '{"name":"SelectFrames","arguments":{"frames":[')


@dataclass(frozen=True)
class Curriculum:
    """What the lessons of a stage are.

    Attributes:
        direct: Share of answers without a call.
        look: Share of calls with an answer after them.
        dropped: Share of answers from what a call showed alone.
        caption: Share of captions.
        exact: Of the calls, those for the evidence.
        jittered: Those that are off by at most a unit or a frame on each side; the rest are random.
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
class Course:
    """The lessons about one world, and their share of a stage.

    Attributes:
        share: Of the lessons, and of the loss.
    """

    world: MiniWorld | MiniVideoWorld
    curriculum: Curriculum
    share: float = 1.0


@dataclass(frozen=True)
class Stage:
    """One stage of imitation."""

    courses: tuple[Course, ...]
    steps: int
    learning_rate: float
    batch_size: int = 96


VISION = VisionStage(MiniWorld(n_objects=3), MiniVideoWorld())
_IMAGE_FORMAT = Curriculum(
    direct=0.15, look=0.2, dropped=0.05, caption=0.6, exact=0.9, jittered=0.1
)
IMAGE_FORMAT = Stage(
    (Course(MiniWorld(n_objects=3), _IMAGE_FORMAT),),
    steps=400,
    learning_rate=3e-3,
)
VIDEO_CAPTIONS = Stage(
    (
        Course(MiniWorld(n_objects=3), _IMAGE_FORMAT, share=0.4),
        Course(
            MiniVideoWorld(),
            Curriculum(direct=0.05, look=0.15, dropped=0.05, caption=0.75, exact=1.0, jittered=0.0),
            share=0.6,
        ),
    ),
    steps=200,
    learning_rate=2e-3,
)
VIDEO_FORMAT = Stage(
    (
        Course(MiniWorld(n_objects=3), _IMAGE_FORMAT, share=0.4),
        Course(
            MiniVideoWorld(),
            Curriculum(direct=0.1, look=0.5, dropped=0.05, caption=0.35, exact=1.0, jittered=0.0),
            share=0.6,
        ),
    ),
    steps=160,
    learning_rate=2e-3,
)
_WEAKENING = Curriculum(
    direct=0.42,
    look=0.41,
    dropped=0.08,
    # Some stay, so that reinforcement learning can bring locating back.
    caption=0.09,
    exact=0.0,
    jittered=0.1,
    cue_label=0.25,
)
WEAKENING = Stage(
    (
        Course(MiniWorld(n_objects=1), _WEAKENING, share=0.5),
        Course(MiniVideoWorld(), _WEAKENING, share=0.5),
    ),
    steps=120,
    learning_rate=1e-3,
)

STAGES = (IMAGE_FORMAT, VIDEO_CAPTIONS, VIDEO_FORMAT, WEAKENING)
"""Of imitation, in order. Frames are learned once boxes are: both from scratch is too much."""

DROPPED_BOXES = (0.5, 0.3)
"""Exact and jittered boxes of answers from a crop alone. Frames are all exact: a wrong frame shows
nothing to read."""


def train_stage(
    model: VisionLanguageModel, writer: LessonWriter, stage: Stage, rng: np.random.Generator
) -> None:
    """Imitates lessons of a stage, in place."""
    openings = frozenset(writer.encoder.tokenizer.convert_tokens_to_ids(CHOICE_OPENINGS))
    optimizer = torch.optim.AdamW(_parameter_groups(model), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(stage.steps):
        set_learning_rate(optimizer, stage.learning_rate, step, stage.steps, decay=0.3)
        loss = torch.zeros(())
        for course in stage.courses:
            number = round(stage.batch_size * course.share)
            lessons = [write_lesson(writer, course, rng) for _ in range(number)]
            logprobs = score(model, lessons, Sampling()).logprobs_T
            weights = torch.tensor([w for c in lessons for w in token_weights(c, openings)])
            loss = loss - course.share * (weights * logprobs).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 40 == 0:
            logger.info("imitation %d/%d: loss %.3f", step + 1, stage.steps, loss.item())


def _parameter_groups(model: VisionLanguageModel) -> list[dict[str, Any]]:
    """The tower that has learned to see goes slowly, or it forgets what a lesson does not show.

    Its deep-stack path is as untrained as the decoder at first.
    """
    seeing: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        slow = ".visual." in f".{name}" and "deepstack" not in name
        (seeing if slow else other).append(parameter)
    return [{"params": other}, {"params": seeing, "lr_scale": VISION_LR_SCALE}]


def write_lesson(writer: LessonWriter, course: Course, rng: np.random.Generator) -> Context:
    """Draws a sample of a course and a lesson about it."""
    sample = course.world.sample(SPLIT, int(rng.integers(1 << 40)))
    c = course.curriculum
    kind = rng.choice(4, p=(c.direct, c.look, c.dropped, c.caption))
    if kind == 0:
        return writer.answer_at_once(sample)
    if kind == 1:
        request = draw_request(sample, c.exact, c.jittered, rng)
        follows_cue = rng.random() < c.cue_label
        digit = str(cue_digit(sample)) if follows_cue else sample.answer.value
        return writer.look_and_answer(sample, request, digit)
    if kind == 2:
        shares = DROPPED_BOXES if sample.modality is Modality.IMAGE else (1.0, 0.0)
        return writer.answer_from_look(sample, draw_request(sample, *shares, rng))
    return writer.caption(sample)


def token_weights(context: Context, openings: Set[int]) -> list[float]:
    """The loss weight of each trained token: more for what follows an opening."""
    trained = [t for span in context.spans if span.trained for t in span.token_ids]
    return [CHOICE_WEIGHT if before in openings else 1.0 for before in [-1, *trained[:-1]]]
