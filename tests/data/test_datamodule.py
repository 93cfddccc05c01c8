import json
import logging

import pytest
from PIL import Image

from clips import make_clip
from reframe_vl.data.datamodule import RecordSource, check_evaluation_size, record_data
from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.report import RecordError
from reframe_vl.mini.source import mini_image_data


def row(name, **changes):
    return {
        "id": name,
        "source": "s",
        "split": "train",
        "licence": "MIT",
        "raw": {},
        "modality": "image",
        "media": {"path": "a.png", "width": 100, "height": 80},
        "question": "What?",
        "answer": {"kind": "span", "value": "that"},
        "boxes": [{"xyxy": [10, 20, 30, 40]}],
        "evidence": {"version": EVIDENCE_VERSION, "boxes": [[5, 15, 35, 45]]},
        **changes,
    }


def media(path="a.png", width=100, height=80):
    return {"media": {"path": path, "width": width, "height": height}}


def video(path, segments=((0.5, 1.0),), frames=(0, 1, 2)):
    grid = {"grid": {"fps": 2, "max_frames": 8}, "timestamps_s": [0.2, 0.7, 1.2, 1.7]}
    length = {"duration_s": 2.0, "n_frames": 20}
    return {
        "modality": "video",
        "media": {"path": path, "width": 96, "height": 64} | length | grid,
        "boxes": [],
        "segments": segments,
        "evidence": {"version": EVIDENCE_VERSION, "segments": [frames]},
    }


@pytest.fixture
def written(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    make_clip(tmp_path / "a.mp4")

    def write(*rows):
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / "r.jsonl"

    return write


UNUSABLE = [
    ({"question": ""}, "bad_record", "line 2: question"),
    (media("gone.png"), "media_missing", r"record odd: media\.path: .*gone\.png.*Check the media"),
    (media("bad.png"), "media_unreadable", r"media\.path: .*bad\.png.*fetch it again"),
    (media(width=200, height=160), "size_mismatch", r"media\.width.*200x160.*100x80"),
    ({"boxes": [{"xyxy": [10, 20, 30, 90]}]}, "box_leaves_image", r"boxes\.0\.xyxy.*clip it"),
    ({"boxes": [{"xyxy": [0.1, 0.2, 0.3, 0.4]}]}, "wrong_scale", r"boxes\.0\.xyxy.*Multiply"),
    ({"modality": "video", "boxes": []}, "grid_missing", r"media\.grid.*video_record"),
    (video("bad.png"), "media_unreadable", r"media\.path: .*bad\.png.*leave its rows out"),
    (video("gone.mp4"), "media_missing", r"media\.path: .*gone\.mp4.*Check the media"),
    (video("a.mp4", [[1.0, 3.0], [2.5, 3.0]]), "segment_outside", r"segments\.1: .*Correct it"),
    (video("a.mp4", frames=[3, 4]), "evidence_off_grid", r"evidence\.segments\.0: .*has 4"),
    ({"evidence": None}, "evidence_missing", r"evidence: .*build_data"),
    ({"evidence": {"version": "0"}}, "evidence_version", r"evidence\.version: .*build_data"),
]


@pytest.mark.parametrize(("changes", "reason", "words"), UNUSABLE)
def test_a_record_that_cannot_be_used_stops_or_is_left_out_and_counted(
    written, caplog, changes, reason, words
):
    path = written(row("one"), row("odd", **changes), row("two"))
    with pytest.raises(RecordError, match=rf"r\.jsonl, .*{words}"):
        RecordSource(path)
    with caplog.at_level(logging.INFO):
        source = RecordSource(path, on_error="skip")
    assert [source[i].id for i in range(len(source))] == ["one", "two"]
    assert source.report.count_by_reason() == {(reason, False): 1}
    assert (source.report.num_kept, source.report.num_left_out) == (2, 1)
    (line,) = (r.message for r in caplog.records)
    assert f"left out ({reason}): 1;" in line


def test_records_of_images_and_videos_stand_in_one_file(written):
    source = RecordSource(written(row("image"), row("video", **video("a.mp4"))))
    assert [source[i].domain for i in range(len(source))] == ["image", "video"]
    assert len(source[1].media.look(range(4), 10**6)) == 4


def test_skipped_records_are_warned_about_in_one_line_a_reason(written, caplog):
    odd = [row(f"gone{i}", **media(f"{i}.png")) for i in range(5)]
    two_boxes = [{"xyxy": [10, 20, 30, 90]}, {"xyxy": [10, 20, 30, 91]}]
    path = written(row("one"), *odd, row("wide", boxes=two_boxes))
    with caplog.at_level(logging.INFO):
        source = RecordSource(path, on_error="skip")
    assert source.report.count_by_reason() == {
        ("media_missing", False): 5,
        ("box_leaves_image", False): 1,
    }
    first, second = (r.message for r in caplog.records)
    assert ": 5;" in first and "0.png" in first
    assert ": 1;" in second and "wide" in second


def test_the_limit_counts_usable_records(written):
    path = written(row("gone", **media("gone.png")), row("one"), row("two"), row("three"))
    source = RecordSource(path, limit=2, on_error="skip")
    assert [source[i].id for i in range(len(source))] == ["one", "two"]


def test_a_file_without_usable_records_names_the_first_problem(written):
    path = written(row("gone", **media("gone.png")))
    with pytest.raises(ValueError, match=r"no usable record.*gone\.png"):
        RecordSource(path, on_error="skip")


def test_where_no_sample_is_left_the_reason_is_the_samples_own(written):
    source = RecordSource(written(row("one")))
    with pytest.raises(ValueError, match="the first, one: it is too long"):
        source.leave_out(lambda sample: "it is too long")


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None, "64"])
def test_an_evaluation_size_is_a_whole_number_of_at_least_one(size):
    with pytest.raises(ValueError, match=r"evaluation_size.*whole number"):
        check_evaluation_size(size)


def test_settings_of_the_data_that_cannot_work_are_refused(written):
    path = str(written(row("one")))
    with pytest.raises(ValueError, match="evaluation_size"):
        record_data(path, None, 0, "raise", 0)
    with pytest.raises(ValueError, match=r"on_error is 'ignore'.*raise.*skip"):
        record_data(path, None, 1, "ignore", 0)
    with pytest.raises(ValueError, match="evaluation_size"):
        mini_image_data(0.5, 1, 0.8, 0, 0)
    assert len(record_data(path, None, 1, "raise", 0).evaluation_samples()) == 1
