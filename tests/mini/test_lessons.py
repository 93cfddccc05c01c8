"""Lessons: the layout of an episode, and exactly the assistant's tokens trained."""

from dataclasses import replace

import numpy as np
import pytest

from reframe_vl.mini.base_training import (
    CHOICE_OPENINGS,
    CHOICE_WEIGHT,
    STAGES,
    token_weights,
    write_lesson,
)
from reframe_vl.mini.lessons import LessonWriter, draw_box, draw_frames, evidence_requests
from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.vision_training import NOTHING, VisionStage, render_frames, render_pool
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import codec_for

CODEC = codec_for("qwen3_vl", compact=True)
WRITER = LessonWriter(
    CODEC, Encoder(build_tokenizer()), ViewMaker(8, 1, 1, 256, 1024, (0.5,) * 3, (0.5,) * 3)
)
SAMPLE = MiniWorld().sample("train", 0)
(REQUEST,) = evidence_requests(SAMPLE)
BOX = REQUEST.boxes[0]
VIDEO = MiniVideoWorld().sample("train", 0)
(FRAMES,) = evidence_requests(VIDEO)
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
    looked = WRITER.look_and_answer(SAMPLE, REQUEST, SAMPLE.answer.value)
    assert text(looked) == PROMPT + CALL + OBSERVATION + answer
    assert trained_text(looked) == CALL + answer
    dropped = WRITER.answer_from_look(SAMPLE, REQUEST)
    assert text(dropped) == PROMPT.replace(IMAGE, "") + CALL + OBSERVATION + answer
    assert trained_text(dropped) == answer
    assert [len(c.views) for c in (direct, looked, dropped)] == [1, 2, 1]


def test_lessons_about_videos_have_an_episodes_layout_too():
    times = [f"<{t:.1f} seconds>{IMAGE}" for t in VIDEO.media.timestamps_s]
    head, tail = "<|im_start|>user\n", f"{VIDEO.question}<|im_end|>\n<|im_start|>assistant\n"
    call = CODEC.render_call("SelectFrames", {"frames": list(FRAMES.frames)})
    shown = "".join(times[frame] for frame in FRAMES.frames)
    seen = OBSERVATION.replace(IMAGE, shown)
    answer = CODEC.render_answer("3")
    looked = WRITER.look_and_answer(VIDEO, FRAMES, "3")
    assert text(looked) == head + "".join(times) + tail + call + seen + answer
    assert trained_text(looked) == call + answer
    dropped = WRITER.answer_from_look(VIDEO, FRAMES)
    assert text(dropped).startswith(head + tail + call + seen)
    caption = WRITER.caption(VIDEO)
    numbers = [",".join(map(str, run)) for e in VIDEO.media.events for run in e.segments]
    assert trained_text(caption) == "".join(numbers)


def test_a_caption_trains_the_coordinates_only():
    sample = MiniWorld(n_objects=3).sample("train", 0)
    caption = WRITER.caption(sample)
    numbers = [",".join(str(round(v / 0.128)) for v in s.box) for s in sample.media.squares]
    assert trained_text(caption) == "".join(numbers)


def test_only_the_answers_digit_and_the_first_frame_weigh_more():
    openings = frozenset(WRITER.encoder.tokenizer.convert_tokens_to_ids(CHOICE_OPENINGS))
    lesson = WRITER.look_and_answer(SAMPLE, REQUEST, SAMPLE.answer.value)
    weights = token_weights(lesson, openings)
    assert weights == [1.0] * 13 + [CHOICE_WEIGHT, 1.0, 1.0]
    assert len(weights) == lesson.num_trained
    lesson = WRITER.look_and_answer(VIDEO, replace(FRAMES, frames=(3, 4)), "7")
    frames = [1.0, 1.0, CHOICE_WEIGHT, *[1.0] * 5]
    assert token_weights(lesson, openings) == [*frames, 1.0, CHOICE_WEIGHT, 1.0, 1.0]


@pytest.mark.parametrize("course", [course for stage in STAGES for course in stage.courses])
def test_a_course_draws_every_kind_of_lesson(course):
    rng = np.random.default_rng(0)
    texts = [text(write_lesson(WRITER, course, rng)) for _ in range(150)]
    full = 10 if isinstance(course.world, MiniVideoWorld) else 1
    kinds = {("<answer>" in t, "<tool_call>" in t, t.count("<|image_pad|>") >= full) for t in texts}
    # A crop alone is one image too.
    dropped = (True, True, False) if full > 1 else (True, True, True)
    assert kinds == {(True, False, True), (True, True, True), dropped, (False, False, True)}


def test_the_shares_of_a_stages_courses_add_up_to_one():
    for stage in STAGES:
        assert sum(course.share for course in stage.courses) == pytest.approx(1.0)


def test_drawn_frames_are_runs_of_the_grid_and_exact_as_often_as_asked():
    rng = np.random.default_rng(0)
    runs = [draw_frames((0, 1), 10, 0.3, 0.3, rng) for _ in range(400)]
    for run in runs:
        assert run == tuple(range(run[0], run[-1] + 1))
        assert 0 <= run[0] <= run[-1] < 10
    assert 0.3 < np.mean([run == (0, 1) for run in runs]) < 0.6


def test_drawn_boxes_lie_on_the_grid_and_are_exact_as_often_as_asked():
    rng = np.random.default_rng(0)
    boxes = [draw_box(BOX, 0.3, 0.3, rng) for _ in range(400)]
    for x0, y0, x1, y1 in boxes:
        assert 0 <= x0 < x1 <= 128
        assert 0 <= y0 < y1 <= 128
        assert all(v % 16 == 0 for v in (x0, y0, x1, y1))
    assert 0.25 < np.mean([box == BOX for box in boxes]) < 0.4


def test_a_vision_pool_labels_what_it_shows():
    stage = VisionStage(MiniWorld(n_objects=3), MiniVideoWorld(), scenes=20, videos=5)
    pool = render_pool(stage, np.random.default_rng(0))
    assert len(pool.whole) == 20
    assert len(pool.crops) == len(pool.crop_digits) == 60
    assert ((pool.digits != NOTHING).sum(1) == 3).all()
    assert ((pool.colors != 8).sum(1) == 3).all()
    frames = render_frames(stage, np.random.default_rng(0))
    assert len(frames.frames) == len(frames.colors) == len(frames.cues) == 50
    # A blank frame has one colour inside the ring, which names the cue.
    for pixels, color in zip(frames.frames, frames.colors.tolist(), strict=True):
        inside = pixels[1:-1, 1:-1].reshape(-1, 3)
        assert (len(np.unique(inside, axis=0)) == 1) == (color == 8)
