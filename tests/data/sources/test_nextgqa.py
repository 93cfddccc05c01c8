import pytest

from data.sources.source_files import NEXTGQA_CSV, NEXTGQA_JSON, read, reasons


def one(tmp_path, old="", new="", windows=NEXTGQA_JSON):
    assert old in NEXTGQA_CSV
    files = {"val.csv": NEXTGQA_CSV.replace(old, new, 1)}
    if windows is not None:
        files["gsub_val.json"] = windows
    return read(tmp_path, "nextgqa", files)


def test_tables_and_windows_are_joined(tmp_path) -> None:
    (first, second), report = one(tmp_path)
    assert first.segments == ((1.2, 3), (4, 6.5)) and second.segments == ()
    assert (first.answer.value, first.options[1]) == ("B", "fun")
    media = first.media
    assert (media.size, media.n_frames, media.duration_s, media.fps) == ((64, 48), 300, 10, 29.97)
    assert reasons(report) == {"no_segment": True}


def test_commas_in_quotes_are_part_of_the_text(tmp_path) -> None:
    (_, second), _ = one(tmp_path)
    assert second.question == "what, then" and second.raw["question"]["question"] == "what, then"


def test_a_split_without_windows_is_read_without_evidence(tmp_path) -> None:
    records, report = one(tmp_path, windows=None)
    assert len(records) == 2 and all(record.evidence is None for record in records)
    assert reasons(report) == {"no_segment": True}


@pytest.mark.parametrize(
    ("old", "new", "reason", "count"),
    [
        ("jump,fun,", "jump,joy,", "answer_not_among_options", 1),
        ("fear,fun,cold", "fun,fun,cold", "ambiguous_answer", 1),
        ("fear,fun,cold,dance", "fear,fun,dance,dance", "repeated_option", 2),
        ("why did he jump", "", "empty_question", 1),
        ("300,64", "0,64", "bad_row", 1),
        ("300,64", "many,64", "bad_row", 1),
        (",dance,sleep", ",sleep", "bad_row", 1),
        (",dance,sleep", ",dance,sleep,more", "bad_row", 1),
        ("why did he jump", 'why "did" he jump', "no_segment", 2),
        ("why did he jump", '"why" did he jump', "bad_csv", 1),
        ("video_id,", "video,", "bad_row", 0),
    ],
)
def test_odd_lines_are_named_and_the_others_read(tmp_path, old, new, reason, count) -> None:
    records, report = one(tmp_path, old, new)
    assert reason in reasons(report) and len(records) == count


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ({"duration": 10, "location": {"9": [[1, 2]]}, "fps": 30}, "no_question"),
        ({"duration": 10, "location": {"4": [[3, 1.2]]}, "fps": 30}, "segment_reversed"),
        ({"duration": 10, "location": {"4": [[11, 12]]}, "fps": 30}, "segment_outside"),
        ({"duration": 10, "location": {"4": [[8, 10.4]]}, "fps": 30}, "segment_beyond_end"),
        ({"duration": 30, "location": {"4": [[8, 10.4]]}, "fps": 30}, "duration_differs"),
        ({"duration": 10, "location": {"4": [[]]}, "fps": 30}, "bad_row"),
        ({"duration": 10, "location": [], "fps": 30}, "bad_row"),
        (None, "bad_row"),
    ],
)
def test_odd_windows_are_named(tmp_path, video, reason) -> None:
    _, report = one(tmp_path, windows={"100": video})
    assert reason in reasons(report)


def test_windows_of_a_video_that_is_named_twice_are_reported(tmp_path) -> None:
    text = '{"100": {"location": {}}, "100": {"location": {}}}'
    _, report = one(tmp_path, windows=text)
    assert reasons(report)["repeated_id"] is False


def test_two_columns_of_a_name_are_refused_and_not_the_last_one_taken(tmp_path) -> None:
    records, report = one(tmp_path, "qid,type", "qid,qid")
    assert not records and reasons(report)["repeated_key"] is False
    assert "line 1" in report.problems[0].where
