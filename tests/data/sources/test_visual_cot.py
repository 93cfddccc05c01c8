import pytest

from data.sources.source_files import VISUAL_COT, read, reasons
from reframe_vl.data.stages.finalise import expand_evidence

ROW = VISUAL_COT


def one(tmp_path, **changes):
    return read(tmp_path, "visual_cot", {"rows.jsonl": [{**ROW, **changes}]})


def test_boxes_are_absolute_and_need_no_image(tmp_path) -> None:
    (record,), report = one(tmp_path)
    assert [box.xyxy for box in record.boxes] == [(10, 20, 30.5, 40)]
    assert (record.media.path, record.media.size) == ("a.jpg", (100, 80))
    assert expand_evidence(record).applicability == "beneficial"
    assert (record.answer.kind, record.split, report.problems) == ("span", "train", [])


def test_subsets_whose_answers_are_not_in_the_image_are_open(tmp_path) -> None:
    (record,), _ = one(tmp_path, dataset="vsr", answer="No")
    assert record.answer.kind == "open"


def test_numbers_as_text_and_text_as_numbers_are_understood(tmp_path) -> None:
    (record,), report = one(tmp_path, width="100", bboxs=[["10", 20, "30.5", 40]], answer=9)
    assert record.boxes[0].xyxy == (10, 20, 30.5, 40) and record.answer.value == "9"
    assert record.raw["width"] == "100" and report.problems == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": " "}, "empty_question"),
        ({"answer": ""}, "empty_answer"),
        ({"image": " "}, "media_missing"),
        ({"question": "half a \ud83d"}, "bad_text"),
        ({"bboxs": [[True, 20, 30, 40]]}, "bad_row"),
        ({"bboxs": [[float("nan"), 20, 30, 40]]}, "bad_row"),
        ({"bboxs": [[10, 20, 10, 40]]}, "bad_row"),
    ],
)
def test_a14_odd_rows_are_named(tmp_path, changes, reason) -> None:
    records, report = one(tmp_path, **changes)
    assert not records and reasons(report) == {reason: False}


def test_rows_nested_too_deeply_for_readers_of_json_are_refused(tmp_path) -> None:
    deep: list = []
    for _ in range(300):
        deep = [deep]
    records, report = one(tmp_path, extra=deep)
    assert not records and reasons(report) == {"bad_row": False}
