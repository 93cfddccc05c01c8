import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.sources.source_files import CONVERSATION, PLACE, read, reasons
from reframe_vl.data.formats.boxes import from_padded_square
from reframe_vl.data.stages.finalise import expand_evidence


def padded(box, size):
    """Pads the image to a square, the smaller half of the padding first; shares of its side."""
    side = max(size)
    left, top = (side - size[0]) // 2, (side - size[1]) // 2
    return [(n + (top if i % 2 else left)) / side for i, n in enumerate(box)]


SIDES = st.integers(1, 5000)
NUMBERS = st.floats(0, 5000)


@given(SIDES, SIDES, st.tuples(*[NUMBERS] * 4))
def test_shares_of_the_padded_square_and_pixels_are_inverse(width, height, box) -> None:
    size = (width, height)
    there = padded(box, size)
    assert from_padded_square(there, size) == pytest.approx(box, abs=1e-8)


def files(conversation=None, place=None):
    made = {}
    if conversation is not None:
        made["gqa.json"] = [{**CONVERSATION, **conversation}]
    if place is not None:
        made["gqa.jsonl"] = [{**PLACE, **place}]
    return made


def said(text: str, pixels: bool = False):
    turns = [dict(turn) for turn in CONVERSATION["conversations"]]
    turns[1]["value"] = text
    image = CONVERSATION["image"] if pixels else CONVERSATION["image"][:1]
    return {"conversations": turns, "image": image}


def test_both_files_give_question_answer_box_and_size(tmp_path) -> None:
    (record,), report = read(tmp_path, "visual_cot_benchmark", files({}, {}))
    assert (record.question, record.answer.value) == ("What is red?", "the door")
    assert record.boxes[0].xyxy == (10, 20, 30, 40) and record.media.size == (80, 101)
    assert report.problems == []
    shares = json.loads(record.raw["conversation"]["conversations"][1]["value"])
    assert [round(n, 3) for n in padded(record.boxes[0].xyxy, (80, 101))] == shares


def test_conversations_alone_have_pixels_but_no_size_and_say_so(tmp_path) -> None:
    (record,), report = read(tmp_path, "visual_cot_benchmark", files({}))
    assert record.boxes[0].xyxy == (10, 20, 30, 40)
    assert record.media.size is None and expand_evidence(record).evidence is None
    assert "width, height" in record.audit[-1].note and report.problems == []
    assert record.sample_problem()[0] == "evidence_missing"


@pytest.mark.parametrize("with_image", [False, True])
def test_shares_alone_need_the_size_of_the_image(tmp_path, with_image) -> None:
    (tmp_path / "media" / "cot" / "gqa").mkdir(parents=True)
    Image.new("RGB", (80, 101)).save(tmp_path / "media" / "cot" / "gqa" / "1.jpg")
    media = tmp_path / "media" if with_image else None
    shares = said("[0.198, 0.198, 0.396, 0.396]")
    records, report = read(tmp_path, "visual_cot_benchmark", files(shares), media)
    if not with_image:
        assert not records and reasons(report) == {"size_unknown": False}
        return
    assert records[0].boxes[0].xyxy == pytest.approx((10, 20, 30, 40), abs=0.06)
    assert reasons(report) == {"rounded_box": True}


def test_questions_alone_ask_for_the_place(tmp_path) -> None:
    (record,), report = read(tmp_path, "visual_cot_benchmark", files(None, {}))
    assert record.question.endswith("What is red?") and len(record.options) == 9
    assert record.options["ABCDEFGHI".index(record.answer.value)] == "top left"
    assert reasons(report) == {"no_conversation": True}


@pytest.mark.parametrize(
    ("conversation", "place", "reason"),
    [
        (said("[0.198, 0.198, 0.396, 0.5]", pixels=True), {}, "boxes_disagree"),
        ({}, {"bbox": [10, 20, 30, 50]}, "boxes_disagree"),
        # Without padding: 10/80 is not (10 + 10)/101.
        (said("[0.125, 0.198, 0.375, 0.396]", pixels=True), {}, "boxes_disagree"),
        (said("a box"), {}, "bad_row"),
        (said("[1, 2]", pixels=True), {}, "bad_row"),
        ({"conversations": []}, {}, "bad_row"),
        ({"image": []}, None, "bad_row"),
    ],
)
def test_d17_boxes_of_another_frame_are_refused(tmp_path, conversation, place, reason) -> None:
    records, report = read(tmp_path, "visual_cot_benchmark", files(conversation, place))
    assert not records and reasons(report) == {reason: False}
