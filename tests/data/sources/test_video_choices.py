"""Sources of multiple choice about videos without boxes: CG-Bench and ReXTime."""

import pytest

from data.sources.source_files import (
    CG_BENCH,
    CG_BENCH_VIDEOS,
    REXTIME,
    REXTIME_OPTIONS,
    read,
    reasons,
)


def cg_bench(tmp_path, videos=CG_BENCH_VIDEOS, **changes):
    files = {"mini.json": [{**CG_BENCH, **changes}]}
    if videos is not None:
        files["meta.json"] = videos
    return read(tmp_path, "cg_bench", files)


def test_cg_bench_takes_exact_facts_of_videos_from_the_second_file(tmp_path) -> None:
    (record,), report = cg_bench(tmp_path)
    media = record.media
    assert (media.duration_s, media.n_frames, media.fps) == (100.1, 3003, 30)
    assert (record.answer.value, record.options[1]) == ("B", "red")
    assert record.segments == ((8, 11), (20, 21)) and report.problems == []


def test_cg_bench_is_read_without_the_second_file(tmp_path) -> None:
    (record,), report = cg_bench(tmp_path, videos=None)
    assert record.media.duration_s == 100 and report.problems == []


@pytest.mark.parametrize(
    ("changes", "reason", "kept"),
    [
        ({"right_answer": "A"}, "answers_disagree", False),
        ({"right_answer": "D"}, "answer_not_among_options", False),
        ({"right_answer": "BB"}, "answer_not_among_options", False),
        ({"answer": "pink"}, "answer_not_among_options", False),
        ({"choices": ["red"]}, "no_options", False),
        ({"choices": []}, "no_options", False),
        ({"clue_intervals": [[9, 9]]}, "segment_empty", False),
        ({"clue_intervals": []}, "no_segment", True),
        ({"duration": 120}, "duration_differs", True),
        ({"question": ""}, "empty_question", False),
        ({"choices": ["blue", "red", 3]}, None, True),
    ],
)
def test_odd_rows_of_cg_bench_are_named(tmp_path, changes, reason, kept) -> None:
    records, report = cg_bench(tmp_path, **changes)
    assert reasons(report) == ({reason: kept} if reason else {})
    assert len(records) == kept


def test_rextime_with_options_is_multiple_choice(tmp_path) -> None:
    (record,), report = read(tmp_path, "rextime", {"rextime_val.json": [REXTIME_OPTIONS]})
    assert (record.options[1], record.answer.value) == ("he sits", "B")
    assert (record.segments, report.problems) == (((5, 8),), [])


def test_rextime_without_options_asks_for_the_window(tmp_path) -> None:
    (record,), report = read(tmp_path, "rextime", {"rextime_val.jsonl": [REXTIME]})
    assert record.question == "From when to when: What does he do before?"
    assert (record.options, record.answer.value) == ((), "5 to 8 seconds")
    assert reasons(report) == {"no_options": True}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**REXTIME_OPTIONS, "ans": "E"}, "answer_not_among_options"),
        ({**REXTIME_OPTIONS, "ans": ""}, "answer_not_among_options"),
        ({**REXTIME_OPTIONS, "options": ["a"]}, "no_options"),
        ({**REXTIME_OPTIONS, "span": [8, 5]}, "segment_reversed"),
        ({**REXTIME, "relevant_windows": []}, "no_answer"),
        ({**REXTIME, "query": None}, "bad_row"),
    ],
)
def test_odd_rows_of_rextime_are_named(tmp_path, row, reason) -> None:
    records, report = read(tmp_path, "rextime", {"val.jsonl": [row]})
    assert not records and reason in reasons(report)


def test_a_window_that_ends_after_the_video_is_kept_and_reported(tmp_path) -> None:
    row = {**REXTIME_OPTIONS, "span": [0, 101]}
    (record,), report = read(tmp_path, "rextime", {"val.jsonl": [row]})
    assert record.segments == ((0, 101),) and reasons(report) == {"segment_beyond_end": True}
