"""Lessons: the layout of an episode, and exactly the assistant's tokens trained."""

import numpy as np
import pytest

from reframe_vl.mini.base_training import (
    ANSWER_WEIGHT,
    FORMAT,
    WEAKENING,
    token_weights,
    write_lesson,
)
from reframe_vl.mini.lessons import LessonWriter, draw_box, evidence_box
from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.mini.vision_training import NOTHING, VisionStage, render_pool
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import codec_for

CODEC = codec_for("qwen3_vl", compact=True)
WRITER = LessonWriter(
    CODEC, Encoder(build_tokenizer()), ViewMaker(8, 1, 1, 256, 1024, (0.5,) * 3, (0.5,) * 3)
)
SAMPLE = MiniWorld().sample("train", 0)
BOX = evidence_box(SAMPLE)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"<|im_start|>user\n{IMAGE}{SAMPLE.question}<|im_end|>\n<|im_start|>assistant\n"
CALL = CODEC.render_call("CropImage", {"bbox_2d": [round(v / 0.128) for v in BOX]})
OBSERVATION = (
    f"\n<|im_start|>user\n<tool_response>\n{IMAGE}\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


def trained_text(context) -> str:
    return "".join(WRITER.encoder.decode(s.token_ids) for s in context.spans if s.trained)


def text(context) -> str:
    return WRITER.encoder.decode(context.token_ids)


def test_lessons_have_an_episodes_layout_and_train_the_assistants_tokens():
    answer = CODEC.render_answer(SAMPLE.answer.value)
    direct = WRITER.answer_at_once(SAMPLE)
    assert text(direct) == PROMPT + answer
    assert trained_text(direct) == answer
    looked = WRITER.look_and_answer(SAMPLE, BOX, SAMPLE.answer.value)
    assert text(looked) == PROMPT + CALL + OBSERVATION + answer
    assert trained_text(looked) == CALL + answer
    dropped = WRITER.answer_from_crop(SAMPLE, BOX)
    assert text(dropped) == PROMPT.replace(IMAGE, "") + CALL + OBSERVATION + answer
    assert trained_text(dropped) == answer
    assert [len(c.views) for c in (direct, looked, dropped)] == [1, 2, 1]


def test_a_caption_trains_the_coordinates_only():
    sample = MiniWorld(n_objects=3).sample("train", 0)
    caption = WRITER.caption(sample)
    numbers = [",".join(str(round(v / 0.128)) for v in s.box) for s in sample.media.squares]
    assert trained_text(caption) == "".join(numbers)


def test_only_the_answers_digit_weighs_more():
    answer_id = WRITER.encoder.tokenizer.convert_tokens_to_ids("<answer>")
    lesson = WRITER.look_and_answer(SAMPLE, BOX, SAMPLE.answer.value)
    weights = token_weights(lesson, answer_id)
    assert weights == [1.0] * 13 + [ANSWER_WEIGHT, 1.0, 1.0]
    assert len(weights) == lesson.num_trained


@pytest.mark.parametrize("stage", [FORMAT, WEAKENING])
def test_a_curriculum_draws_every_kind_of_lesson(stage):
    rng = np.random.default_rng(0)
    texts = [text(write_lesson(WRITER, stage.world, stage.curriculum, rng)) for _ in range(150)]
    kinds = {(("<answer>" in t), ("<tool_call>" in t), t.count("<|image_pad|>")) for t in texts}
    assert kinds == {(True, False, 1), (True, True, 2), (True, True, 1), (False, False, 1)}


def test_drawn_boxes_lie_on_the_grid_and_are_exact_as_often_as_asked():
    rng = np.random.default_rng(0)
    boxes = [draw_box(BOX, 0.3, 0.3, rng) for _ in range(400)]
    for x0, y0, x1, y1 in boxes:
        assert 0 <= x0 < x1 <= 128
        assert 0 <= y0 < y1 <= 128
        assert all(v % 16 == 0 for v in (x0, y0, x1, y1))
    assert 0.25 < np.mean([box == BOX for box in boxes]) < 0.4


def test_a_vision_pool_labels_what_it_shows():
    pool = render_pool(VisionStage(MiniWorld(n_objects=3), scenes=20), np.random.default_rng(0))
    assert len(pool.whole) == 20
    assert len(pool.crops) == len(pool.crop_digits) == 60
    assert ((pool.digits != NOTHING).sum(1) == 3).all()
    assert ((pool.colors != 8).sum(1) == 3).all()
