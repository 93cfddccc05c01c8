import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from reframe_vl.data.records import Record, read_records, write_records
from reframe_vl.data.report import RecordError, Report
from reframe_vl.data.sources.visual_cot_sroie import VisualCotSroie
from reframe_vl.data.stages.finalise import FinaliseSettings, expand_evidence, finalise
from reframe_vl.data.validation import validate_record


def row(**changes: Any) -> dict[str, Any]:
    return {
        "question": "What is the total?",
        "answer": "9.00",
        "image": "a.jpg",
        "width": 100,
        "height": 80,
        "bboxs": [[10, 20, 30, 40]],
        "dataset": "sroie",
        "split": "train",
        **changes,
    }


def read(folder: Path, *rows: Any, strict: bool = False) -> tuple[list[Record], Report]:
    if not (folder / "a.jpg").exists():
        Image.new("RGB", (100, 80), "white").save(folder / "a.jpg")
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    report = Report(strict=strict)
    return list(VisualCotSroie(folder / "rows.jsonl", folder).records(report)), report


def test_a_row_becomes_a_record_that_keeps_it_verbatim(tmp_path) -> None:
    (record,), report = read(tmp_path, row(extra=[1]))
    assert record.raw == row(extra=[1])
    assert (record.answer.kind, record.answer.value) == ("span", "9.00")
    assert record.boxes[0].xyxy == (10, 20, 30, 40)
    assert report.problems == [] and record.evidence is None
    record = expand_evidence(record)
    assert record.evidence.boxes == ((5, 15, 35, 45),)
    assert record.coverage == pytest.approx(900 / 8000)
    assert record.applicability == "beneficial"


def test_expanding_twice_is_refused(tmp_path) -> None:
    (record,), _ = read(tmp_path, row())
    expanded = expand_evidence(record)
    with pytest.raises(ValueError, match="expanded already, by rules '1'"):
        expand_evidence(expanded)


def test_ids_depend_on_the_row_and_not_on_its_place(tmp_path) -> None:
    first, _ = read(tmp_path, row(), row(answer="1"))
    second, _ = read(tmp_path, row(answer="1"), row())
    assert [r.id for r in first] == [r.id for r in reversed(second)]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("{broken", "bad_json"),
        ("[]", "bad_row"),
        (row(answer=None), "bad_row"),
        (row(width=0), "bad_row"),
        (row(bboxs=[[30, 20, 10, 40]]), "bad_row"),
        (row(bboxs=[[10, 20, 30]]), "bad_row"),
        (row(image="gone.jpg"), "media_missing"),
        (row(image="x" * 300 + ".jpg"), "media_missing"),
        (row(image="a\0.jpg"), "media_missing"),
        (row(image=""), "media_missing"),
        (row(image="cut.jpg"), "media_unreadable"),
        (row(width=80, height=100), "size_mismatch"),
        (row(bboxs=[[10, 20, 30, 90]]), "box_leaves_image"),
        (row(bboxs=[[10, 20, 30, 40], [801, 497, 1017, 838]]), "wrong_scale"),
        (row(bboxs=[[0.1, 0.2, 0.3, 0.4]]), "wrong_scale"),
        (row(), "duplicate_row"),
    ],
)
def test_a16_d17_odd_rows_are_left_out_with_a_reason_and_the_others_kept(
    tmp_path, odd, reason
) -> None:
    Image.effect_noise((100, 80), 90).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:1500])
    records, report = read(tmp_path, row(), odd, row(answer="last"))
    assert [r.answer.value for r in records] == ["9.00", "last"]
    assert report.count_by_reason() == {(reason, False): 1}
    assert "line 2" in report.problems[0].where
    with pytest.raises(RecordError, match=r"rows\.jsonl, line 2"):
        read(tmp_path, row(), odd, row(answer="last"), strict=True)


def test_a_box_one_pixel_outside_is_clipped_and_the_record_says_so(tmp_path) -> None:
    (record,), report = read(tmp_path, row(bboxs=[[-1, 20, 101, 40]]))
    assert record.boxes[0].xyxy == (0, 20, 100, 40)
    assert record.raw["bboxs"] == [[-1, 20, 101, 40]]
    assert "clipped" in record.audit[-1].note
    assert report.count_by_reason() == {("box_clipped", True): 1}


def test_a_row_without_boxes_is_kept_without_evidence(tmp_path) -> None:
    (record,), report = read(tmp_path, row(bboxs=[]))
    assert record.evidence is None and record.applicability is None
    assert report.count_by_reason() == {("no_box", True): 1}


def test_evidence_too_small_for_a_call_is_kept_by_the_source_and_dropped_in_the_end(
    tmp_path,
) -> None:
    small = row(bboxs=[[10, 20, 30, 40], [50, 20, 51.3, 60]])
    records, report = read(tmp_path, small, row(bboxs=[[50, 20, 51.5, 60]]))
    assert (report.num_kept, report.num_left_out, report.problems) == (2, 0, [])
    first, second = finalise(records, FinaliseSettings())
    assert (first.verdict, first.reason) == ("dropped", "call_refused")
    assert "49.675, 10.0, 51.625" in first.record.audit[-1].note
    # Thousandths of the image move so narrow a box by more than a twentieth of it.
    assert (second.verdict, second.reason) == ("kept", "")


def test_every_real_receipt_row_is_read_losslessly_and_valid(tmp_path, shared_data) -> None:
    annotations = shared_data / "annotations" / "visual_cot_sroie.jsonl"
    report = Report()
    source = VisualCotSroie(annotations, shared_data / "images" / "sroie")
    expanded = map(expand_evidence, source.records(report))
    assert write_records(tmp_path / "r.jsonl", expanded) == 40
    assert report.problems == []
    records = read_records(tmp_path / "r.jsonl")
    assert [r.raw for r in records] == list(map(json.loads, annotations.read_text().splitlines()))
    assert len({r.id for r in records}) == 40
    for record in records:
        assert validate_record(record, tmp_path) == []
        sample = record.to_sample(tmp_path)
        for box in sample.evidence.boxes:
            height, width, _ = sample.media.look(box, 50_000).shape
            assert 0 < height * width <= 50_000
