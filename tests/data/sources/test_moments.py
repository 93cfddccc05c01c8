"""Sources that describe windows: Charades-STA, QVHighlights, ActivityNet Captions, YouCook2."""

import pytest

from data.sources.source_files import (
    CAPTIONS,
    CHARADES,
    CHARADES_CAPTION,
    CHARADES_LINE,
    QVHIGHLIGHTS,
    read,
    reasons,
)
from reframe_vl.data.sources import SOURCES


def test_the_three_encodings_of_charades_sta_say_the_same(tmp_path) -> None:
    files = {
        "charades_sta_test.txt": CHARADES_LINE,
        "test.jsonl": [CHARADES],
        "test.json": {"annotations": [CHARADES_CAPTION]},
    }
    records, report = read(tmp_path, "charades_sta", files)
    assert len(records) == 3 and report.problems == []
    for record in records:
        assert record.question == "From when to when: person opens the door."
        assert record.answer.value == "1.5 to 7.25 seconds"
        assert (record.segments, record.media.path) == (((1.5, 7.25),), "AB12C.mp4")
        assert record.split == "test"
    assert [record.media.duration_s for record in records] == [None, 30.5, None]
    native = [SOURCES["charades_sta"](tmp_path).native(record) for record in records]
    assert native == [CHARADES_LINE.strip(), CHARADES, CHARADES_CAPTION]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("AB12C 1.5 7.25 opens", "bad_row"),
        ("AB12C 1.5##opens", "bad_row"),
        ("AB12C one 7.25##opens", "bad_row"),
        ("AB12C 7.25 1.5##opens", "segment_reversed"),
        ("AB12C 1.5 1.5##opens", "segment_empty"),
        ("AB12C nan 1.5##opens", "segment_not_finite"),
        ("AB12C -3 -1##opens", "segment_outside"),
        ("AB12C 1.5 7.25##  ", "empty_question"),
    ],
)
def test_odd_lines_are_named_and_the_others_read(tmp_path, line, reason) -> None:
    files = {"charades_sta_test.txt": f"{line}\r\n{CHARADES_LINE}"}
    records, report = read(tmp_path, "charades_sta", files)
    assert len(records) == 1 and reasons(report) == {reason: False}
    assert "line 1" in report.problems[0].where


@pytest.mark.parametrize(
    ("windows", "reason", "segments"),
    [
        ([[1.5, 30.9]], "segment_beyond_end", ((1.5, 30.9),)),
        ([[-0.2, 7]], "segment_clipped", ((0, 7),)),
        ([[31, 40]], "segment_outside", None),
        ([[10, 700]], "segment_outside", None),
        ([[1, 2], [5, 5]], "segment_empty", None),
        ([], "no_answer", None),
        ([[1, 2, 3]], "bad_row", None),
        ([[1, None]], "bad_row", None),
    ],
)
def test_windows_that_do_not_fit_the_video_are_named(tmp_path, windows, reason, segments) -> None:
    row = {**CHARADES, "relevant_windows": windows}
    records, report = read(tmp_path, "charades_sta", {"test.jsonl": [row]})
    assert reasons(report) == {reason: segments is not None}
    assert [record.segments for record in records] == ([] if segments is None else [segments])


def test_a_source_id_that_comes_again_with_another_row_is_reported(tmp_path) -> None:
    rows = [CHARADES, {**CHARADES, "query": "another"}]
    records, report = read(tmp_path, "charades_sta", {"test.jsonl": rows})
    assert len({record.id for record in records}) == 2
    assert reasons(report) == {"repeated_id": True}


def test_several_windows_are_one_answer(tmp_path) -> None:
    (record,), report = read(tmp_path, "qvhighlights", {"a_val.jsonl": [QVHIGHLIGHTS]})
    assert record.segments == ((6, 10), (14, 16))
    assert record.answer.value == "6 to 10 seconds, 14 to 16 seconds"
    assert (record.media.duration_s, report.problems) == (150, [])


@pytest.mark.parametrize(
    ("changes", "reason", "kept"),
    [
        ({"relevant_clip_ids": [3, 4]}, "pieces_differ", True),
        ({"relevant_windows": [[6, 11]], "relevant_clip_ids": [3, 4]}, "pieces_differ", True),
        ({"relevant_windows": []}, "no_answer", False),
        ({"duration": "long"}, "bad_row", False),
    ],
)
def test_odd_rows_of_qvhighlights_are_named(tmp_path, changes, reason, kept) -> None:
    row = {**QVHIGHLIGHTS, **changes}
    records, report = read(tmp_path, "qvhighlights", {"a.jsonl": [row]})
    assert reasons(report)[reason] is kept and len(records) == kept


def test_a_test_split_without_windows_is_refused_with_the_reason(tmp_path) -> None:
    row = {key: QVHIGHLIGHTS[key] for key in ("qid", "query", "duration", "vid")}
    records, report = read(tmp_path, "qvhighlights", {"test.jsonl": [row]})
    assert not records and "test split" in report.problems[0].message


@pytest.mark.parametrize("name", ["activitynet_captions", "youcook2"])
def test_sentences_become_questions_and_the_video_comes_back(tmp_path, name) -> None:
    (first, second), report = read(tmp_path, name, {"val_1.json": CAPTIONS})
    assert second.question == "From when to when: They sit."
    assert (first.segments, second.segments) == (((0, 4.14),), ((4.14, 50.5),))
    assert report.problems == [] and second.raw["sentence"] == " They sit."
    back = {
        **first.raw["facts"],
        "timestamps": [record.raw["timestamp"] for record in (first, second)],
        "sentences": [record.raw["sentence"] for record in (first, second)],
    }
    assert {first.raw["video"]: back} == CAPTIONS


@pytest.mark.parametrize(
    ("changes", "reason", "count"),
    [
        ({"sentences": ["one"]}, "captions_disagree", 0),
        ({"sentences": [], "timestamps": []}, "no_caption", 0),
        ({"timestamps": None}, "bad_row", 0),
        ({"sentences": ["one", " "]}, "empty_question", 1),
        ({"timestamps": [[0, 4], [50.5, 60]]}, "segment_outside", 1),
        ({"timestamps": [[0, 4], [50, 51]]}, "segment_beyond_end", 2),
        ({"duration": 0}, "bad_row", 0),
    ],
)
def test_odd_captions_are_named(tmp_path, changes, reason, count) -> None:
    files = {"val.json": {"v_a": {**CAPTIONS["v_a"], **changes}}}
    records, report = read(tmp_path, "activitynet_captions", files)
    assert reason in reasons(report) and len(records) == count


def test_a_video_that_is_named_twice_gives_the_records_of_both(tmp_path) -> None:
    one = '{"duration": 9, "timestamps": [[0, 1]], "sentences": ["%s"]}'
    text = f'{{"v_a": {one % "a"}, "v_a": {one % "b"}}}'
    records, report = read(tmp_path, "activitynet_captions", {"val.json": text})
    assert len(records) == 2 and reasons(report) == {"repeated_id": True}


def test_a_window_that_stands_twice_is_noted(tmp_path) -> None:
    row = {**CHARADES, "relevant_windows": [[1.5, 7.25], [1.5, 7.25]]}
    (record,), report = read(tmp_path, "charades_sta", {"test.jsonl": [row]})
    assert len(record.segments) == 2 and reasons(report) == {"repeated_segment": True}
