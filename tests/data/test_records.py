import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clips import make_clip
from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.records import Record, iter_records, read_records, write_records
from reframe_vl.data.report import RecordError, Report
from reframe_vl.data.validation import validate_record
from reframe_vl.data.video import GridRule
from reframe_vl.types import Applicability, Modality


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "id": "s/1",
        "source": "s",
        "split": "train",
        "licence": "MIT",
        "raw": {"q": "What?", "n": [1, 2.50, None]},
        "modality": "image",
        "media": {"path": "a.png", "width": 100, "height": 80},
        "question": "What?",
        "answer": {"kind": "span", "value": "that"},
        "boxes": [{"xyxy": [10, 20, 30, 40]}],
        "evidence": {"version": EVIDENCE_VERSION, "boxes": [[5, 15, 35, 45]]},
        "coverage": 0.1,
        "applicability": "beneficial",
        **changes,
    }


MEDIA = {"path": "a.mp4", "width": 96, "height": 64, "duration_s": 2.0, "n_frames": 20}
MEDIA |= {"fps": 10.0, "grid": {"fps": 2, "max_frames": 8}, "timestamps_s": [0.2, 0.7, 1.2, 1.7]}
VIDEO = {"modality": "video", "media": MEDIA, "boxes": [], "segments": [[0.5, 1.0]]}
VIDEO |= {"evidence": {"version": EVIDENCE_VERSION, "segments": [[0, 1, 2]]}}


def record(**changes: Any) -> Record:
    return Record.model_validate(fields(**changes))


def written(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def test_a_record_survives_the_file_unchanged_with_its_raw_row(tmp_path) -> None:
    raw = {
        "text": 'ü "quoted" \u2028',
        "box": [608.3399999999999, 1, -0.0],
        "big": 2**70,
        "n": None,
    }
    records = [record(raw=raw), record(id="s/2", boxes=[], evidence=None, coverage=None)]
    assert write_records(tmp_path / "new" / "r.jsonl", records) == 2
    assert read_records(tmp_path / "new" / "r.jsonl") == records


def test_raw_values_that_are_not_finite_are_kept(tmp_path) -> None:
    write_records(tmp_path / "r.jsonl", [record(raw={"a": math.nan, "b": math.inf})])
    (back,) = read_records(tmp_path / "r.jsonl")
    assert math.isnan(back.raw["a"]) and back.raw["b"] == math.inf


def test_a_bad_line_is_named_with_its_file_line_field_and_remedy(tmp_path) -> None:
    bad = fields(id="s/2", media={"path": "a.png", "width": "wide", "height": 80})
    path = written(tmp_path / "r.jsonl", fields(), bad)
    with pytest.raises(RecordError, match=r"r\.jsonl, line 2: media\.width: .*'wide'.*Mend") as e:
        read_records(path)
    assert "pydantic" not in str(e.value)


def test_skipped_lines_are_counted_by_reason_and_logged(tmp_path, caplog) -> None:
    path = written(
        tmp_path / "r.jsonl",
        b"\xef\xbb\xbf" + json.dumps(fields()).encode(),
        b"{not json",
        b"",
        fields(),
        b'{"id": "\xff"}',
        [1, 2],
        fields(id="s/2"),
    )
    report = Report()
    assert [r.id for r in read_records(path, on_error="skip", report=report)] == ["s/1", "s/2"]
    assert report.count_by_reason() == {("bad_record", False): 3, ("duplicate_id", False): 1}
    assert (report.num_kept, report.num_left_out) == (2, 4)
    assert "line 2" in caplog.text and "line 4" in caplog.text


def test_records_are_read_one_by_one(tmp_path) -> None:
    path = written(tmp_path / "r.jsonl", fields(), b"{not json")
    rows = iter_records(path, Report(strict=True))
    assert next(rows).id == "s/1"
    with pytest.raises(RecordError):
        next(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, "surprise"),
        ({"schema_version": 2}, "schema_version"),
        ({"question": ""}, "question"),
        ({"boxes": [{"xyxy": [30, 20, 10, 40]}]}, "x0 < x1"),
        ({"boxes": [{"xyxy": [1, 2, 3]}]}, "xyxy"),
        ({"boxes": [{"xyxy": [1, 2, 3, math.inf]}]}, "finite"),
        ({"segments": [[1, 2]]}, "no segments"),
        ({"media": {"path": "a.png", "width": 9, "height": 9, "grid": {}}}, "no grid"),
        ({"modality": "video"}, "no boxes"),
        (VIDEO | {"evidence": {"version": "1", "segments": [[1, 1]]}}, "ascend"),
        (VIDEO | {"evidence": {"version": "1", "segments": [[]]}}, "at least 1"),
        (VIDEO | {"media": MEDIA | {"timestamps_s": [1.0, 0.5]}}, r"(?s)timestamps_s.*ascend"),
        (VIDEO | {"media": MEDIA | {"grid": {"fps": 0}}}, r"(?s)media\.grid.*above 0"),
        (VIDEO | {"media": MEDIA | {"grid": {"frames": 8}}}, r"(?s)media\.grid.*frames"),
        ({"modality": "video", "boxes": [], "segments": [[2, 2]]}, "start_s < end_s"),
        ({"coverage": 1.5}, "coverage"),
        ({"answer": {"kind": "mcq", "value": "D"}, "options": ["x", "y"]}, "option's letter"),
    ],
)
def test_impossible_records_are_refused_and_the_field_is_named(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        record(**changes)


def test_a_failed_write_leaves_the_older_file_and_no_rest(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("older")

    def rows():
        yield record()
        raise RecordError("bad row")

    with pytest.raises(RecordError):
        write_records(path, rows())
    assert path.read_text() == "older"
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_media_below_the_record_file_are_named_relative_to_it(tmp_path) -> None:
    inside = {"path": str(tmp_path / "images" / "a.png"), "width": 4, "height": 4}
    outside = {"path": str(tmp_path.parent / "b.png"), "width": 4, "height": 4}
    write_records(tmp_path / "r.jsonl", [record(media=inside), record(id="s/2", media=outside)])
    first, second = read_records(tmp_path / "r.jsonl")
    assert first.media.path == "images/a.png"
    assert second.media.path == outside["path"]


def test_a_record_becomes_a_sample_with_expanded_evidence_only(tmp_path) -> None:
    Image.new("RGB", (100, 80), "red").save(tmp_path / "a.png")
    sample = record().to_sample(tmp_path)
    assert sample.evidence.boxes == ((5, 15, 35, 45),)
    assert (sample.modality, sample.domain) == (Modality.IMAGE, "image")
    assert sample.applicability is Applicability.BENEFICIAL
    assert (sample.answer.kind, sample.answer.value) == ("span", "that")
    assert sample.media.size == (100, 80)


def test_a_record_of_a_video_becomes_a_sample_and_opens_no_file(tmp_path) -> None:
    sample = record(**VIDEO).to_sample(tmp_path)
    assert sample.evidence.segments == ((0, 1, 2),)
    assert (sample.modality, sample.domain) == (Modality.VIDEO, "video")
    assert sample.media.timestamps_s == (0.2, 0.7, 1.2, 1.7)
    assert (sample.media.size, sample.media.rule) == ((96, 64), GridRule(2, 8))


TIMED = {"xyxy": [1, 2, 3, 4], "time_s": 2, "frame": 7, "label": "sofa"}


def test_boxes_of_a_video_have_a_time_and_its_evidence_are_its_segments(tmp_path) -> None:
    timed = record(**VIDEO | {"boxes": [TIMED]})
    assert (timed.boxes[0].time_s, timed.boxes[0].frame) == (2, 7)
    assert timed.to_sample(tmp_path).evidence.boxes == ()
    with pytest.raises(ValueError, match="no times"):
        record(boxes=[TIMED])


def test_a_size_that_is_not_known_yet_is_none_and_keeps_the_record_from_training(tmp_path) -> None:
    unknown = record(media={"path": "a.png"}, evidence=None)
    assert unknown.media.size is None and validate_record(unknown) == []
    with pytest.raises(ValueError, match="build_data"):
        unknown.to_sample(tmp_path)
    with pytest.raises(ValueError, match="both, or neither"):
        record(media={"path": "a.png", "width": 100})


def test_notes_of_earlier_record_files_are_read_as_plain_notes() -> None:
    (entry,) = record(audit=[{"stage": "pool", "note": "read"}]).audit
    assert (entry.verdict, entry.reason, entry.verifier) == (None, None, None)


def test_a_record_without_evidence_has_none_rather_than_an_empty_one(tmp_path) -> None:
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    bare = record(boxes=[], evidence=None, coverage=None, applicability=None).to_sample(tmp_path)
    assert bare.evidence is None and bare.applicability is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modality": "video", "boxes": []}, "media.grid.*video_record"),
        (VIDEO | {"media": MEDIA | {"n_frames": None}}, "media.grid.*video_record"),
        ({"evidence": None}, "no expanded evidence"),
        (VIDEO | {"evidence": None}, "no expanded evidence"),
        (VIDEO | {"evidence": {"version": "1", "segments": [[4]]}}, "segments.0.*grid.* has 4"),
        ({"evidence": {"version": "0", "boxes": []}}, "build the file again"),
    ],
)
def test_records_that_cannot_be_samples_say_why(tmp_path, changes, message) -> None:
    with pytest.raises(ValueError, match=rf"s/1.*{message}"):
        record(**changes).to_sample(tmp_path)


# --------------------------------------------------------------------------- validation


def with_box(size: tuple[int, int], *box: float) -> Record:
    media = {"path": "a.png", "width": size[0], "height": size[1]}
    return record(media=media, boxes=[{"xyxy": box}])


def test_a16_a_box_wholly_outside_is_flagged_as_wrong_scale() -> None:
    (problem,) = validate_record(with_box((768, 768), 801, 497, 1017, 838))
    assert problem.reason == "wrong_scale"
    assert "768x768" in problem.message and "801" in problem.message


def test_a16_a_normalised_box_is_flagged_although_it_lies_inside() -> None:
    (problem,) = validate_record(with_box((768, 768), 0.1, 0.2, 0.5, 1.0))
    assert problem.reason == "wrong_scale" and "0-1" in problem.message


def test_d17_a_box_on_a_1000_grid_is_reported_with_the_likely_frame() -> None:
    (problem,) = validate_record(with_box((597, 640), 100, 200, 500, 649))
    assert problem.reason == "box_leaves_image"
    assert "0-1000 grid" in problem.message and "9 pixels" in problem.message


def test_boxes_that_touch_the_edges_are_fine() -> None:
    assert validate_record(with_box((597, 640), 0, 0, 597, 640)) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [((80, 100), "EXIF"), ((200, 160), "another scale"), ((100, 100), "padded")],
)
def test_a_size_that_is_not_the_files_is_flagged_with_the_likely_cause(
    tmp_path, size, message
) -> None:
    Image.new("RGB", size).save(tmp_path / "a.png")
    (problem,) = validate_record(record(), tmp_path)
    assert problem.reason == "size_mismatch" and message in problem.message


def test_e15_the_stated_size_is_compared_with_the_upright_file(tmp_path) -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    Image.new("RGB", (80, 100)).save(tmp_path / "a.png", exif=tags)
    assert validate_record(record(), tmp_path) == []


def test_missing_media_are_flagged(tmp_path) -> None:
    (problem,) = validate_record(record(), tmp_path)
    assert problem.reason == "media_missing"
    assert str(tmp_path / "a.png") in problem.message and "Check the media" in problem.message


@pytest.mark.parametrize("name", ["x" * 300 + ".png", "a\0.png", "."])
def test_media_that_no_file_can_be_are_flagged(tmp_path, name) -> None:
    media = {"path": name, "width": 100, "height": 80}
    (problem,) = validate_record(record(media=media), tmp_path)
    assert problem.reason == "media_unreadable"


def test_a_window_that_begins_after_the_video_is_flagged() -> None:
    (problem,) = validate_record(record(**VIDEO | {"segments": [[1.9, 5], [2.0, 3]]}))
    assert problem.reason == "segment_outside"
    assert problem.message.startswith("segments.1: ") and "2 s long" in problem.message


def test_videos_are_opened_and_their_size_compared(tmp_path) -> None:
    (problem,) = validate_record(record(**VIDEO), tmp_path)
    assert problem.reason == "media_missing" and "a.mp4" in problem.message
    make_clip(tmp_path / "a.mp4", n=2)
    assert validate_record(record(**VIDEO), tmp_path) == []
    turned = VIDEO | {"media": MEDIA | {"width": 64, "height": 96}}
    (problem,) = validate_record(record(**turned), tmp_path)
    assert problem.reason == "size_mismatch" and "rotation" in problem.message
    (tmp_path / "a.mp4").write_bytes(b"no video")
    (problem,) = validate_record(record(**VIDEO), tmp_path)
    assert problem.reason == "media_unreadable"
