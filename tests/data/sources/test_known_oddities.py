"""Each oddity that the real excerpts are known to have ends in a record, or in a stated reason."""

import json
import shutil

import numpy as np
import pytest

from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES
from reframe_vl.data.video import GridRule, VideoFile
from reframe_vl.data.video_records import video_info


def read(name, *paths, media=None):
    report = Report(log_level=0)
    return list(SOURCES[name](list(paths), media).records(report)), report


@pytest.fixture
def excerpt(shared_data):
    return lambda file: shared_data / "annotations" / file


def test_a_box_that_leaves_the_frame_by_a_pixel_is_clipped_once_the_frame_is_known(
    excerpt, shared_data, tmp_path
):
    rows = [
        row for row in json.loads(excerpt("tvqa_plus_val.json").read_text()) if row["qid"] == 132532
    ]
    (tmp_path / "tvqa_plus_val.json").write_text(json.dumps(rows))
    (record,), report = read("tvqa_plus", tmp_path / "tvqa_plus_val.json")
    widest = max(record.boxes, key=lambda box: box.xyxy[2])
    assert widest.xyxy[2] == 641 and report.problems == []
    # The clip is not at hand: an excerpt's video of another size stands in for it.
    (tmp_path / "media").mkdir()
    video = shared_data / "videos" / "univtg_charades.mp4"
    shutil.copy(video, tmp_path / "media" / f"{record.media.path}")
    width, height = video_info(video, GridRule()).size
    for shift, reason in ((1, "box_clipped"), (2, "box_leaves_image")):
        rows[0]["bbox"] = {
            "1": [{"img_id": 1, "left": 0, "top": 0, "width": width + shift, "height": height}]
        }
        (tmp_path / "tvqa_plus_val.json").write_text(json.dumps(rows))
        records, report = read(
            "tvqa_plus", tmp_path / "tvqa_plus_val.json", media=tmp_path / "media"
        )
        assert len(records) == (shift == 1) and reason in {p.reason for p in report.problems}


def test_d17_boxes_of_the_square_padded_frame_become_pixels_of_the_image(excerpt):
    files = [excerpt("visual_cot_bench_gqa.json"), excerpt("visual_cot_benchdet_gqa.jsonl")]
    records, report = read("visual_cot_benchmark", *files)
    assert len(records) == 40 and report.problems == []
    for record in records:
        shares = json.loads(record.raw["conversation"]["conversations"][1]["value"])
        side, (width, height) = max(record.media.size), record.media.size
        # Taken as shares of the image itself, boxes would lie elsewhere.
        box = record.boxes[0].xyxy
        assert box[0] == pytest.approx(shares[0] * side - (side - width) // 2, abs=side / 500)
        assert box[1] == pytest.approx(shares[1] * side - (side - height) // 2, abs=side / 500)
    assert sum(record.media.width != record.media.height for record in records) > 30


def test_a_box_drawn_on_a_resized_image_is_refused_and_its_likely_frame_named(excerpt, tmp_path):
    rows = [json.loads(line) for line in excerpt("visual_cot_sroie.jsonl").read_text().splitlines()]
    row = rows[0]
    for change in ({"width": row["width"] // 2, "height": row["height"] // 2},):
        (tmp_path / "sroie.jsonl").write_text(json.dumps({**row, **change}))
        media = excerpt("").parent / "images" / "sroie"
        records, report = read("visual_cot_sroie", tmp_path / "sroie.jsonl", media=media)
        assert not records
        (problem,) = report.problems
        assert problem.reason in ("size_mismatch", "wrong_scale", "box_leaves_image")


def test_windows_that_end_after_the_video_stay_and_are_reported(excerpt):
    records, report = read("rextime", excerpt("rextime_val.jsonl"))
    late = [record for record in records if record.segments[0][1] > record.media.duration_s]
    assert [(r.segments[0], r.media.duration_s) for r in late] == [
        ((0, 130), 129.96),
        ((12, 148), 147.91),
    ]
    notes = [p for p in report.problems if p.reason == "segment_beyond_end"]
    assert len(notes) == 2 and all(note.kept and "line" in note.where for note in notes)


@pytest.mark.parametrize("window", [[], [[5, 5]], [[7, 5]]])
def test_empty_windows_are_left_out_with_a_reason(excerpt, tmp_path, window):
    row = json.loads(excerpt("qvhighlights_val.jsonl").read_text().splitlines()[0])
    (tmp_path / "val.jsonl").write_text(json.dumps({**row, "relevant_windows": window}))
    records, report = read("qvhighlights", tmp_path / "val.jsonl")
    assert not records
    assert report.problems[0].reason in ("no_answer", "segment_empty", "segment_reversed")


def test_frames_without_boxes_make_no_box(excerpt):
    records, report = read("tvqa_plus", excerpt("tvqa_plus_val.json"))
    empty = [r for r in records if not r.raw["bbox"] or not all(r.raw["bbox"].values())]
    assert len(empty) == 5 and report.problems == []
    for record in empty:
        boxed = {int(frame) for frame, boxes in record.raw["bbox"].items() if boxes}
        assert {box.frame for box in record.boxes} == boxed


def test_whole_and_broken_seconds_in_one_window_are_read_alike(excerpt):
    records, _ = read("activitynet_captions", excerpt("activitynet_captions_timer1_val2.json"))
    mixed = [r for r in records if len({type(edge) for edge in r.raw["timestamp"]}) == 2]
    assert len(mixed) > 20
    for record in mixed:
        assert list(record.segments[0]) == record.raw["timestamp"]
        assert all(isinstance(edge, float) for edge in record.segments[0])


@pytest.mark.parametrize(
    ("name", "files", "count"),
    [
        ("qvhighlights", ["qvhighlights_val.jsonl"], 11),
        ("cg_bench", ["cgbench_mini.json", "cgbench_video_meta.json"], 4),
        ("nextgqa", ["nextgqa/val.csv", "nextgqa/gsub_val.json"], 23),
    ],
)
def test_several_windows_of_a_question_are_as_many_segments(excerpt, name, files, count):
    records, _ = read(name, *map(excerpt, files))
    assert sum(len(record.segments) > 1 for record in records) == count


def test_the_exact_duration_replaces_the_listed_one(excerpt):
    files = [excerpt("cgbench_mini.json"), excerpt("cgbench_video_meta.json")]
    records, report = read("cg_bench", *files)
    rounded = [
        record
        for record in records
        if record.raw["question"]["duration"] != record.raw["video"]["duration"]
    ]
    assert len(rounded) >= 5 and report.problems == []
    for record in rounded:
        assert record.media.duration_s == record.raw["video"]["duration"]


def test_the_decoded_duration_replaces_the_listed_one_and_large_differences_are_reported(
    excerpt, shared_data, tmp_path
):
    shutil.copy(shared_data / "videos" / "univtg_charades.mp4", tmp_path / "Y1HGC.mp4")
    pair = excerpt("pair_charades_sta_Y1HGC.jsonl")
    records, report = read("charades_sta", pair, media=tmp_path)
    decoded = VideoFile(tmp_path / "Y1HGC.mp4").facts.duration_s
    listed = json.loads(pair.read_text().splitlines()[0])["duration"]
    assert {record.media.duration_s for record in records} == {decoded} and decoded != listed
    row = {**json.loads(pair.read_text().splitlines()[0]), "duration": listed + 3}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    _, report = read("charades_sta", tmp_path / "t.jsonl", media=tmp_path)
    assert [(p.reason, p.kept) for p in report.problems] == [("duration_differs", True)]


def test_boxes_of_tvqa_plus_are_at_three_frames_a_second_from_1(excerpt):
    records, _ = read("tvqa_plus", excerpt("tvqa_plus_val.json"))
    for record in records:
        start, end = record.segments[0]
        for box in record.boxes:
            assert box.time_s == (box.frame - 1) / 3
            # Annotators marked a little more than the window; another rate would lie far off.
            assert start - 2 <= box.time_s <= end + 1


def test_of_a_file_with_several_streams_the_first_video_is_read(shared_data):
    info = video_info(shared_data / "videos" / "nasa_13013.mp4", GridRule(2, 8))
    assert info.size == (320, 180) and len(info.timestamps_s) == 8


def test_e13_times_are_the_files_own_and_not_those_of_its_average_rate(shared_data):
    path = shared_data / "videos" / "videollava_sample_demo_22.mp4"
    times = VideoFile(path, GridRule(100, 10**6)).timestamps_s
    assert np.diff(times) == pytest.approx(1 / 30)
    # Its header says 1090 frames in 36.301 s, which is another rate.
    assert abs(times[-1] - times[0] - (len(times) - 1) * 36.301 / 1090) > 0.02
    assert set(VideoFile(path, GridRule(2, 16)).timestamps_s) <= set(times)
