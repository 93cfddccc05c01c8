import unicodedata

import pytest
from PIL import Image

from clips import make_clip
from data.sources.source_files import CHARADES, TVQA_PLUS, VISUAL_COT, read, reasons
from reframe_vl.data.stages.finalise import expand_evidence
from reframe_vl.data.video import GridRule

CLIP = {**CHARADES, "duration": 2, "relevant_windows": [[0.5, 1]]}


@pytest.fixture
def media(tmp_path):
    (tmp_path / "media" / "deep").mkdir(parents=True)
    return tmp_path / "media"


def images(tmp_path, media, name):
    rows = {"a.jsonl": [{**VISUAL_COT, "image": name}]}
    return read(tmp_path / "in", "visual_cot", rows, media)


@pytest.mark.parametrize(
    "name", ["a.jpg", "other/a.jpg", "/home/someone/a.jpg", "../../a.jpg", "C:\\x\\a.jpg"]
)
def test_a_file_is_found_by_its_name_in_any_folder_below(tmp_path, media, name) -> None:
    Image.new("RGB", (100, 80)).save(media / "deep" / "a.jpg")
    (record,), _ = images(tmp_path, media, name)
    assert record.media.path == str(media / "deep" / "a.jpg")


def test_files_outside_the_folder_are_never_read(tmp_path, media) -> None:
    Image.new("RGB", (100, 80)).save(tmp_path / "a.jpg")
    records, report = images(tmp_path, media, "../a.jpg")
    assert not records and reasons(report) == {"media_missing": False}


def test_a_name_that_two_files_have_is_refused(tmp_path, media) -> None:
    for folder in ("deep", "deeper"):
        (media / folder).mkdir(exist_ok=True)
        Image.new("RGB", (100, 80)).save(media / folder / "a.jpg")
    records, report = images(tmp_path, media, "b/a.jpg")
    assert not records and reasons(report) == {"media_ambiguous": False}
    (record,), _ = images(tmp_path, media, "deep/a.jpg")
    assert record.media.path == str(media / "deep" / "a.jpg")


def test_a_video_gets_its_grid_and_evidence_and_may_have_another_suffix(tmp_path, media) -> None:
    make_clip(media / "deep" / "AB12C.mkv", n=20)
    (record,), report = read(
        tmp_path / "in", "charades_sta", {"a.jsonl": [CLIP]}, media, grid=GridRule(2, 8)
    )
    assert record.media.grid == GridRule(2, 8) and record.media.path.endswith("AB12C.mkv")
    record = expand_evidence(record)
    assert record.media.size == (96, 64) and record.evidence.segments
    assert record.sample_problem() is None and report.problems == []


@pytest.mark.parametrize(
    ("changes", "reason", "kept"),
    [
        ({"duration": 4}, "duration_differs", True),
        ({"duration": 9, "relevant_windows": [[5, 6]]}, "segment_outside", False),
        ({"vid": "gone"}, "media_missing", False),
        ({"vid": "broken"}, "media_unreadable", False),
    ],
)
def test_videos_that_are_not_as_listed_are_named(tmp_path, media, changes, reason, kept) -> None:
    make_clip(media / "AB12C.mp4", n=20)
    (media / "broken.mp4").write_bytes(b"no video")
    rows = {"a.jsonl": [{**CLIP, **changes}]}
    records, report = read(tmp_path / "in", "charades_sta", rows, media)
    assert reasons(report) == {reason: kept} and len(records) == kept


def test_boxes_of_a_video_are_fitted_to_its_frames(tmp_path, media) -> None:
    make_clip(media / "s01e01_clip_00.mp4", n=20)
    box = {"img_id": 1, "left": 90, "top": 2, "width": 7, "height": 4, "label": "sofa"}
    row = {**TVQA_PLUS, "ts": [0.5, 1], "bbox": {"1": [box]}}
    (record,), report = read(tmp_path / "in", "tvqa_plus", {"a.json": [row]}, media)
    assert record.boxes[0].xyxy == (90, 2, 96, 6) and reasons(report) == {"box_clipped": True}
    evidence = expand_evidence(record).evidence
    assert evidence.segments and evidence.boxes == ()
    row["bbox"]["1"][0]["width"] = 50
    records, report = read(tmp_path / "in", "tvqa_plus", {"a.json": [row]}, media)
    assert not records and reasons(report) == {"box_leaves_image": False}


def test_accents_may_be_written_in_either_way(tmp_path, media) -> None:
    Image.new("RGB", (100, 80)).save(media / "deep" / unicodedata.normalize("NFD", "café.jpg"))
    make_clip(media / "deep" / unicodedata.normalize("NFD", "né.mp4"), n=20)
    (record,), _ = images(tmp_path, media, unicodedata.normalize("NFC", "café.jpg"))
    assert record.media.path.startswith(str(media / "deep"))
    (clip,), _ = read(tmp_path / "in", "charades_sta", {"a.jsonl": [{**CLIP, "vid": "né"}]}, media)
    assert clip.media.grid is not None


@pytest.mark.parametrize(
    ("box", "reason"),
    [([10, 80, 50, 95], None), ([10, 80, 50, 100.5], "box_clipped"), ([10, 20, 90, 40], "leaves")],
)
def test_a14_e15_boxes_are_held_against_the_upright_image_of_a_source_without_sizes(
    tmp_path, media, box, reason
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (100, 80)).save(media / "a.jpg", exif=exif)
    row = {"media": "a.jpg", "question": "What?", "answer": "that", "boxes": [box]}
    records, report = read(tmp_path / "in", "columns", {"rows.jsonl": [row]}, media)
    assert [r.media.size for r in records] == ([] if reason == "leaves" else [(80, 100)])
    assert reasons(report) == (
        {"box_leaves_image": False} if reason == "leaves" else {reason: True} if reason else {}
    )
