import math

import pytest

from data.sources.source_files import TVQA_PLUS, read, reasons


def one(tmp_path, **changes):
    return read(tmp_path, "tvqa_plus", {"tvqa_plus_val.json": [{**TVQA_PLUS, **changes}]})


def test_boxes_have_the_time_of_their_frame_at_3_a_second_from_1(tmp_path) -> None:
    (record,), report = one(tmp_path)
    first, second = record.boxes
    assert (first.xyxy, first.frame, first.time_s, first.label) == ((1, 2, 4, 6), 1, 0, "sofa")
    assert (second.xyxy, second.frame, second.time_s) == ((5, 6, 25, 36), 7, 2)
    assert record.segments == ((1.5, 6),) and record.media.size is None
    assert (record.options[3], record.answer.value) == ("Dan .", "D")
    assert report.problems == []


def test_the_native_boxes_come_back_from_the_record(tmp_path) -> None:
    (record,), _ = one(tmp_path)
    back = {frame: [] for frame in TVQA_PLUS["bbox"]}
    for box in record.boxes:
        left, top, right, bottom = box.xyxy
        native = {"img_id": box.frame, "left": left, "top": top}
        native |= {"width": right - left, "height": bottom - top, "label": box.label}
        back[str(round(box.time_s * 3) + 1)].append(native)
    assert back == TVQA_PLUS["bbox"]


@pytest.mark.parametrize(
    ("changes", "reason", "kept"),
    [
        ({"answer_idx": None}, "no_answer", False),
        ({"answer_idx": "5"}, "answer_not_among_options", False),
        ({"a1": "Dan ."}, "ambiguous_answer", False),
        ({"a1": "Ann ."}, "repeated_option", True),
        ({"a1": ""}, "empty_option", False),
        ({"q": ""}, "empty_question", False),
        ({"ts": [math.nan, math.nan]}, "segment_not_finite", False),
        ({"ts": "1.5-6"}, "bad_row", False),
        ({"ts": [6, 1.5]}, "segment_reversed", False),
        ({"ts": [6, 6]}, "segment_empty", False),
        ({"ts": None}, "no_segment", True),
        ({"bbox": {"x": []}}, "bad_row", False),
        ({"bbox": {"7": [{"img_id": 8, "left": 5, "top": 6, "width": 2, "height": 3}]}},
         "frames_disagree", False),
        ({"bbox": {"7": [{"img_id": 7, "left": 5, "top": 6, "width": 0, "height": 3}]}},
         "bad_row", False),
    ],
)  # fmt: skip
def test_odd_rows_are_named(tmp_path, changes, reason, kept) -> None:
    records, report = one(tmp_path, **changes)
    assert reasons(report) == {reason: kept} and len(records) == kept
