import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.sources.source_files import COLUMNS, COLUMNS_ROW, read, reasons
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES


def one(tmp_path, mapping=COLUMNS, media=None, **changes):
    files = {"rows.jsonl": [{**COLUMNS_ROW, **changes}], "columns.yaml": mapping}
    records, report = read(tmp_path, "columns", files, media)
    return records[0] if records else None, report


def test_columns_are_found_by_their_mapping_and_the_sets_own_source_is_kept(tmp_path):
    record, report = one(tmp_path, source="gqa")
    assert (record.media.path, record.question, record.source) == ("a.jpg", "What is red?", "gqa")
    assert record.boxes[0].xyxy == (10, 20, 30.5, 40)
    assert record.raw == COLUMNS_ROW | {"source": "gqa"}
    assert (record.answer.kind, record.answer.value) == ("mcq", "B")
    assert report.problems == [] and record.id.startswith("columns/a/")


@pytest.mark.parametrize(
    ("mapping", "box", "expected"),
    [
        ("", [10, 20, 30, 40], (10, 20, 30, 40)),
        ("", "[[10, 20, 30, 40]]", (10, 20, 30, 40)),
        ("box_form: corner_and_size", [[10, 20, 30, 40]], (10, 20, 40, 60)),
        ("box_unit: shares", [0.1, 0.25, 0.3, 0.5], (10, 20, 30, 40)),
        ("box_unit: thousandths", [100, 250, 300, 500], (10, 20, 30, 40)),
        (
            "box_unit: thousandths\nbox_form: corner_and_size",
            [100, 250, 200, 250],
            (10, 20, 30, 40),
        ),
    ],
)
def test_boxes_of_every_form_become_pixels(tmp_path, mapping, box, expected):
    names = "media: image.path\nquestion: q\nboxes: bbox\n"
    record, _ = one(tmp_path, names + mapping, bbox=box)
    assert record.boxes[0].xyxy == pytest.approx(expected)


def test_boxes_in_shares_need_a_size_which_the_image_may_give(tmp_path):
    mapping = "media: image.path\nquestion: q\nboxes: bbox\nbox_unit: shares\n"
    changes = {"bbox": [0.1, 0.25, 0.3, 0.5], "width": None, "height": None}
    _, report = one(tmp_path / "a", mapping, **changes)
    assert reasons(report) == {"size_unknown": False}
    (tmp_path / "media").mkdir()
    Image.new("RGB", (100, 80)).save(tmp_path / "media" / "a.jpg")
    record, _ = one(tmp_path / "b", mapping, tmp_path / "media", **changes)
    assert record.boxes[0].xyxy == pytest.approx((10, 20, 30, 40))


def test_videos_have_windows_and_their_boxes_without_a_time_are_noted(tmp_path):
    record, report = one(tmp_path, image={"path": "v.mp4"}, segments=[[500, 1500]], duration=9)
    assert record.modality == "video" and record.segments == ((0.5, 1.5),) and not record.boxes
    assert record.media.duration_s == 9 and reasons(report) == {"box_without_time": True}


@pytest.mark.parametrize(
    ("form", "answer", "letter"),
    [("letter", "b", "B"), ("letter", "(B)", "B"), ("text", "roof", "B"), ("number", 0, "A")],
)
def test_the_right_option_is_named_by_letter_text_or_number(tmp_path, form, answer, letter):
    record, _ = one(tmp_path, COLUMNS + f"answer_form: {form}\n", answer=answer)
    assert record.answer.value == letter


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answer": "door"}, "answer_not_among_options"),
        ({"image": {"path": None}}, "bad_row"),
        ({"image": {"path": ["a.jpg", "b.jpg"]}}, "bad_row"),
        ({"bbox": "here"}, "bad_row"),
        ({"bbox": [[30, 20, -5, 40]]}, "bad_row"),
        ({"q": None}, "bad_row"),
        ({"width": 10**30}, "bad_row"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path, changes, reason):
    record, report = one(tmp_path, **changes)
    assert record is None and reasons(report) == {reason: False}


@pytest.mark.parametrize(
    "mapping", ["boxs: x", "[1]", "a: [", "box_unit: feet", "second: 0", "\tx"]
)
def test_a_mapping_that_says_nothing_is_named_and_no_row_is_read_by_it(tmp_path, mapping):
    record, report = one(tmp_path, mapping)
    assert record is None and reasons(report) == {"bad_columns": False}
    assert "columns.yaml" in report.problems[0].where and "box_form" in report.problems[0].message


def test_parquet_is_read_and_images_within_it_are_named_only(tmp_path):
    table = pa.table(
        {
            "media": [{"bytes": b"1", "path": "a.jpg"}, {"bytes": b"1", "path": None}],
            "question": ["q", "r"],
            "answer": ["a", "b"],
            "boxes": [[[1.0, 2.0, 3.0, 4.0]], None],
            "width": [10, 20],
            "height": [10, 20],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    report = Report()
    (record,) = SOURCES["columns"](tmp_path).records(report)
    assert record.raw["media"] == {"path": "a.jpg"} and record.boxes[0].xyxy == (1, 2, 3, 4)
    assert [(p.where.rpartition(", ")[2], p.reason) for p in report.problems] == [
        ("row 2", "bad_row")
    ]
    content = (tmp_path / "a.parquet").read_bytes()
    for cut in (0, 3, len(content) // 2, len(content) - 1):
        (tmp_path / "a.parquet").write_bytes(content[:cut])
        report = Report(log_level=0)
        assert not list(SOURCES["columns"](tmp_path).records(report))
        assert reasons(report) == {"bad_parquet": False}


def test_two_mappings_in_one_folder_are_refused_and_neither_is_used(tmp_path):
    files = {"rows.jsonl": [COLUMNS_ROW], "a.yaml": COLUMNS, "b.yml": "question: other\n"}
    records, report = read(tmp_path, "columns", files)
    assert not records and reasons(report) == {"bad_columns": False}
    assert "b.yml" in report.problems[0].where and "a.yaml" in report.problems[0].message


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        (["A. door", "B. roof"], True),
        (["(a) door", "(b) roof"], True),
        (["A door", "B roof"], False),
        (["A. Smith", "J. Doe"], False),
    ],
)
def test_options_that_carry_their_letters_are_noted(tmp_path, options, noted):
    record, report = one(tmp_path, options=options)
    assert record.options == tuple(options)
    assert reasons(report) == ({"lettered_options": True} if noted else {})
