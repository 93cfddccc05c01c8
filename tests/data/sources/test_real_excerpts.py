"""Real excerpts of every source: all rows are read, and boxes lie on what they name."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from reframe_vl.data.media import ImageFile
from reframe_vl.data.records import Record, read_records, write_records
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES
from reframe_vl.data.stages.finalise import expand_evidence
from reframe_vl.data.validation import validate_record

EXCERPTS = [
    ("activitynet_captions", ["activitynet_captions_timer1_val2.json"], 138, {}),
    ("cg_bench", ["cgbench_mini.json", "cgbench_video_meta.json"], 40, {}),
    ("cg_bench", ["cgbench_mini.json"], 40, {}),
    ("charades_sta", ["charades_sta_test_lighthouse.jsonl"], 60, {}),
    ("charades_sta", ["charades_sta_timechat_gt.json"], 40, {}),
    ("charades_sta", ["pair_charades_sta_Y1HGC.jsonl"], 2, {}),
    ("coco", ["visdrone_coco.json"], 16, {}),
    ("nextgqa", ["nextgqa"], 149, {}),
    ("nextgqa", ["nextgqa/val.csv"], 149, {("no_segment", True): 149}),
    ("qvhighlights", ["qvhighlights_val.jsonl"], 40, {}),
    ("refcoco", ["refcoco_unc_val.jsonl"], 60, {}),
    (
        "rextime",
        ["rextime_val.jsonl"],
        60,
        {("no_options", True): 60, ("segment_beyond_end", True): 2},
    ),
    ("tvqa_plus", ["tvqa_plus_val.json"], 25, {}),
    ("visdrone", ["visdrone_coco.json"], 16, {}),
    ("visual_cot", ["visual_cot_sroie.jsonl", "visual_cot_vsr_train.jsonl"], 100, {}),
    ("visual_cot_benchmark", ["visual_cot_bench_gqa.json"], 40, {}),
    (
        "visual_cot_benchmark",
        ["visual_cot_bench_gqa.json", "visual_cot_benchdet_gqa.jsonl"],
        40,
        {},
    ),
    (
        "visual_cot_benchmark",
        ["visual_cot_benchdet_gqa.jsonl"],
        40,
        {("no_conversation", True): 40},
    ),
    ("visual_cot_sroie", ["visual_cot_sroie.jsonl"], 40, {}),
    ("youcook2", ["youcook2_val.json"], 241, {}),
]


def native_rows(path):
    """The rows of an annotation file, read as simply as can be."""
    if path.suffix == ".csv":
        with path.open(newline="") as stream:
            return list(csv.DictReader(stream))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("name", "files", "count", "found"), EXCERPTS, ids=lambda value: str(value)[:40]
)
def test_every_row_of_the_excerpts_is_a_record(
    tmp_path, shared_data, name, files, count, found
) -> None:
    report = Report()
    source = SOURCES[name]([shared_data / "annotations" / file for file in files])
    records = list(source.records(report))
    assert (len(records), report.num_left_out) == (count, 0)
    assert report.count_by_reason() == found
    write_records(tmp_path / "r.jsonl", records)
    assert read_records(tmp_path / "r.jsonl") == records
    for record in records:
        assert validate_record(record) == []


def records_of(shared_data, name, *files) -> tuple[list[Record], list]:
    paths = [shared_data / "annotations" / file for file in files]
    return list(SOURCES[name](paths).records(Report())), [native_rows(path) for path in paths]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("visual_cot", "visual_cot_vsr_train.jsonl"),
        ("refcoco", "refcoco_unc_val.jsonl"),
        ("qvhighlights", "qvhighlights_val.jsonl"),
        ("charades_sta", "charades_sta_test_lighthouse.jsonl"),
        ("rextime", "rextime_val.jsonl"),
    ],
)
def test_corners_and_windows_are_the_rows_own(shared_data, name, file) -> None:
    records, (rows,) = records_of(shared_data, name, file)
    assert [record.raw for record in records] == rows
    for record, row in zip(records, rows, strict=True):
        if "bbox" in row or "bboxs" in row:
            expected = row.get("bboxs", [row.get("bbox")])
            assert [list(box.xyxy) for box in record.boxes] == expected
        else:
            assert [list(segment) for segment in record.segments] == row["relevant_windows"]


def test_widths_and_frames_of_tvqa_plus_come_back(shared_data) -> None:
    records, (rows,) = records_of(shared_data, "tvqa_plus", "tvqa_plus_val.json")
    assert [record.raw for record in records] == rows
    for record, row in zip(records, rows, strict=True):
        back = {frame: [] for frame in row["bbox"]}
        for box in record.boxes:
            left, top, right, bottom = box.xyxy
            native = {"img_id": box.frame, "label": box.label, "left": left, "top": top}
            native |= {"width": right - left, "height": bottom - top}
            back[str(round(box.time_s * 3) + 1)].append(native)
        assert back == row["bbox"] and [list(s) for s in record.segments] == [row["ts"]]
        assert "ABCDE".index(record.answer.value) == int(row["answer_idx"])


def test_captions_come_back_by_video(shared_data) -> None:
    for name, file in (
        ("activitynet_captions", "activitynet_captions_timer1_val2.json"),
        ("youcook2", "youcook2_val.json"),
    ):
        records, (videos,) = records_of(shared_data, name, file)
        back = {}
        for record in records:
            raw = record.raw
            video = back.setdefault(
                raw["video"], {**raw["facts"], "timestamps": [], "sentences": []}
            )
            video["timestamps"].append(raw["timestamp"])
            video["sentences"].append(raw["sentence"])
            assert [list(segment) for segment in record.segments] == [raw["timestamp"]]
        assert back == videos


def test_tables_and_windows_of_nextgqa_come_back(shared_data) -> None:
    records, (rows, windows) = records_of(
        shared_data, "nextgqa", "nextgqa/val.csv", "nextgqa/gsub_val.json"
    )
    assert [record.raw["question"] for record in records] == rows
    back = {}
    for record in records:
        row, found = record.raw["question"], record.raw["windows"]
        video = back.setdefault(row["video_id"], {**found, "location": {}})
        video["location"][row["qid"]] = found["location"]
        assert [list(segment) for segment in record.segments] == found["location"]
        assert record.options["ABCDE".index(record.answer.value)] == row["answer"]
    assert back == windows


def test_annotations_of_the_coco_format_come_back(shared_data) -> None:
    records, (file,) = records_of(shared_data, "visdrone", "visdrone_coco.json")
    back = [annotation for record in records for annotation in record.raw["annotations"]]
    assert sorted(back, key=lambda a: a["id"]) == sorted(file["annotations"], key=lambda a: a["id"])
    for record in records:
        corners = [
            [x, y, x + width, y + height]
            for x, y, width, height in (a["bbox"] for a in record.raw["annotations"])
        ]
        assert [list(box.xyxy) for box in record.boxes] == corners
        assert int(record.answer.value) == len(corners)


def test_shares_of_the_padded_square_are_those_of_the_boxes(shared_data) -> None:
    records, (conversations, _) = records_of(
        shared_data,
        "visual_cot_benchmark",
        "visual_cot_bench_gqa.json",
        "visual_cot_benchdet_gqa.jsonl",
    )
    assert [record.raw["conversation"] for record in records] == conversations
    for record in records:
        width, height = record.media.size
        side = max(width, height)
        left, top = (side - width) // 2, (side - height) // 2
        x0, y0, x1, y1 = record.boxes[0].xyxy
        shares = [(x0 + left) / side, (y0 + top) / side, (x1 + left) / side, (y1 + top) / side]
        said = json.loads(record.raw["conversation"]["conversations"][1]["value"])
        assert shares == pytest.approx(said, abs=0.001)


# --------------------------------------------------------------------------- with their media


def regions(record: Record):
    """The whole image and a mask of each box."""
    pixels = ImageFile(Path(record.media.path)).look(None, 10**9).astype(float)
    for box in record.boxes:
        x0, y0, x1, y1 = (round(side) for side in box.xyxy)
        mask = np.zeros(pixels.shape[:2], bool)
        mask[y0:y1, x0:x1] = True
        yield box, pixels, mask


def test_boxes_of_white_cells_are_purple_and_the_rest_is_not(shared_data) -> None:
    folder = shared_data / "images" / "bccd"
    report = Report()
    records = list(SOURCES["voc"](folder, folder).records(report))
    assert report.num_left_out == 0 and {r.boxes[0].label for r in records} >= {"WBC", "RBC"}
    for record in records:
        assert validate_record(record, folder) == []
        for box, pixels, mask in regions(record):
            if box.label == "WBC":
                purple = pixels[..., 2] - pixels[..., 1]
                assert purple[mask].mean() > purple[~mask].mean() + 20


def test_xml_files_come_back_and_their_corners_too(shared_data) -> None:
    folders = [shared_data / "images" / "bccd", shared_data / "images" / "raccoon"]
    source = SOURCES["voc"](folders, shared_data / "images")
    files = {path.name: path.read_bytes().decode() for f in folders for path in f.glob("*.xml")}
    for record in source.records(Report()):
        text = source.native(record)
        assert text in files.values()
        for box in record.boxes:
            x0, y0, x1, y1 = box.xyxy
            corners = zip(("xmin", "ymin", "xmax", "ymax"), (x0 + 1, y0 + 1, x1, y1), strict=True)
            for tag, value in corners:
                assert f"<{tag}>{value:g}</{tag}>" in text


def test_the_orange_and_the_blue_car_are_where_their_boxes_are(shared_data) -> None:
    folder = shared_data / "images" / "sahi"
    (record,) = SOURCES["coco"](folder / "terrain2_coco.json", folder).records(Report())
    assert record.answer.value == "5"
    redness = []
    for _, pixels, mask in regions(record):
        redness.append((pixels[..., 0] - pixels[..., 2])[mask].mean())
    assert max(redness) == redness[1] and min(redness) == redness[2] < -30


def test_boxes_of_receipts_hold_more_ink_than_the_paper(shared_data) -> None:
    source = SOURCES["visual_cot"](
        shared_data / "annotations" / "visual_cot_sroie.jsonl", shared_data / "images"
    )
    checked = 0
    for record in source.records(Report()):
        for box, pixels, mask in regions(record):
            if box.xyxy[3] - box.xyxy[1] < 40:  # Of one line.
                ink = pixels.mean(2) < 128
                assert ink[mask].mean() > 1.5 * ink.mean()
                checked += 1
    assert checked > 10


def test_a_real_video_gets_the_frames_of_its_windows(tmp_path, shared_data) -> None:
    (tmp_path / "videos").mkdir()
    shutil.copy(shared_data / "videos" / "univtg_charades.mp4", tmp_path / "videos" / "Y1HGC.mp4")
    annotations = shared_data / "annotations" / "pair_charades_sta_Y1HGC.jsonl"
    report = Report()
    records = list(SOURCES["charades_sta"](annotations, tmp_path / "videos").records(report))
    assert len(records) == 2 and report.problems == []
    for record in map(expand_evidence, records):
        assert record.sample_problem() is None and validate_record(record, tmp_path) == []
        start, end = record.segments[0]
        times = [record.media.timestamps_s[frame] for frame in record.evidence.segments[0]]
        assert times[0] <= start + 1 and times[-1] >= end - 1 and len(times) <= 8
