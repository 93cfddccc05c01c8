import base64
import json
import struct
import zlib

import datasets
import pytest

from clips import make_clip
from evaluation.benchmarks.releases import (
    MAKERS,
    in_base64,
    made,
    opened,
    picture,
    write_json,
    write_lines,
)
from reframe_vl.data.formats.rows import Refused
from reframe_vl.data.report import Report
from reframe_vl.evaluation.benchmarks import BENCHMARKS
from reframe_vl.evaluation.releases.files import files_of, hub_rows, rows_of
from reframe_vl.evaluation.releases.media import MediaStore
from reframe_vl.types import Modality

FIRST = {
    "vstar": ("What colour is thing 0?", ("red", "light blue"), "B"),
    "hr_bench_4k": ("How many at 0?", ("one", "two", "three", "four"), "B"),
    "hr_bench_8k": ("How many at 0?", ("one", "two", "three", "four"), "B"),
    "visual_probe": ("What stands on the sign?", (), "Easy Street"),
    "mme_realworld_lite": (
        "How many lorries are there?",
        ("13", "90", "77", "6", "The image does not feature it"),
        "D",
    ),
    "treebench": ("What is the cup made of?", ("glass", "wood", "steel", "paper"), "B"),
    "cv_bench": ("How many chairs are there?", ("1", "2", "3"), "B"),
    "video_mme": ("How many candles burn?", ("1.", "4.", "2.", "3."), "C"),
    "longvideobench": ("Who comes in last?", ("a cook", "a dog", "nobody"), "B"),
    "mlvu": ("What is it?", ("1", "a hat", "none"), "B"),
    "lvbench": ("What year does it begin?", ("1636", "1366", "1363", "1633"), "D"),
    "cg_bench": ("What colour is the cart?", ("grey", "blue", "silver", "white"), "D"),
    "nextgqa": (
        "why does the man bend down",
        ("to dance", "to sleep", "tie his shoe", "wave", "jump"),
        "C",
    ),
    "vsi_bench": ("How many tables are there?", (), "4"),
    "dynamath": ("How long is the side?", (), "2.500"),
    "mathverse": ("A can is 13 cm high. How long is the straw?", (), "14"),
    "wemath": (
        "How long is it?",
        ("300, 400", "400, 300", "30", "4 m.", "No correct answer"),
        "B",
    ),
    "tir_bench": ("Do it.", (), "1, 2, 3, 4"),
    "reason_rft_counting": ("How many are left?", (), "5"),
    "reason_rft_structure": ("How many are left?", (), "B"),
    "reason_rft_spatial": (
        "How many are left?",
        (),
        "change_color(1, red), change_size(2, small)",
    ),
}
COUNTS = {"vstar": 3, "hr_bench_4k": 8, "hr_bench_8k": 8, "visual_probe": 3, "cv_bench": 3}
COUNTS |= {"mlvu": 3, "cg_bench": 1, "nextgqa": 1, "vsi_bench": 3, "dynamath": 4, "wemath": 7}
COUNTS |= {"tir_bench": 8}
LEFT_OUT = {"longvideobench": "no_answer", "mlvu": "generation_task", "nextgqa": "no_windows"}
LEFT_OUT |= {"mathverse": "no_image", "tir_bench": "bad_answer"}


def test_every_benchmark_has_a_release_a_config_and_a_row_in_the_docs(pytestconfig):
    root = pytestconfig.rootpath
    assert set(FIRST) == set(MAKERS) == set(BENCHMARKS)
    assert {p.stem for p in (root / "configs" / "benchmark").glob("*.yaml")} == set(BENCHMARKS)
    page = (root / "docs" / "evaluation.md").read_text()
    assert [name for name in BENCHMARKS if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", FIRST)
def test_a_release_is_read_whole_and_odd_rows_are_told(name, tmp_path):
    benchmark, items, report = made(name, tmp_path)
    samples = [item.sample for item in items]
    assert len({s.id for s in samples}) == len(items) == COUNTS.get(name, 2)
    by_id = sorted(samples, key=lambda s: s.id)
    assert (samples[0].question, samples[0].options, samples[0].answer.value) == FIRST[name] or any(
        (s.question, s.options, s.answer.value) == FIRST[name] for s in by_id
    )
    assert {s.source for s in samples} == {name} and {s.split for s in samples} == {"test"}
    assert [p.reason for p in report.problems] == ([LEFT_OUT[name]] if name in LEFT_OUT else [])
    for item in items:
        assert item.cluster and all(item.groups.values())
        assert set(benchmark.by) <= set(item.groups)
        if item.sample.modality is Modality.IMAGE:
            assert item.sample.media.size[0] >= 20


def test_images_of_equal_bytes_are_unpacked_once_and_are_one_cluster(tmp_path):
    _, items, _ = made("hr_bench_4k", tmp_path)
    assert len({item.cluster for item in items}) == 2
    assert len([p for p in (tmp_path / "unpacked").rglob("*") if p.is_file()]) == 2


def test_variants_and_steps_are_drawn_together(tmp_path):
    _, items, _ = made("dynamath", tmp_path / "d")
    assert [item.cluster for item in items] == ["1", "1", "2", "3"]
    _, items, _ = made("wemath", tmp_path / "w")
    assert {item.cluster for item in items} == {"2steps_1", "3steps_1"}


def test_several_images_are_shown_side_by_side(tmp_path):
    _, items, _ = made("tir_bench", tmp_path)
    sizes = {item.groups["task"][0]: item.sample.media.size for item in items}
    assert sizes["color"] == (30, 20) and sizes["spot_difference"] == (30 + 16 + 10, 25)


def test_annotated_boxes_and_windows_become_expanded_evidence(tmp_path):
    _, items, _ = made("treebench", tmp_path / "t", with_windows=True)
    boxes = items[0].sample.evidence.boxes
    assert boxes[0] == (0, 0, 24, 18) and items[0].facts["boxes"][0] == (4, 3, 20, 15)
    for name in ("cg_bench", "nextgqa"):
        folder = tmp_path / name
        MAKERS[name](folder)
        (video,) = folder.rglob("*.mp4")
        make_clip(video)
        _, items, report = opened(name, folder, with_windows=True)
        assert items[0].sample.evidence.segments, report.problems


def test_a_missing_medium_leaves_its_row_out_with_the_remedy(tmp_path):
    MAKERS["vstar"](tmp_path)
    (tmp_path / "direct_attributes" / "0.png").unlink()
    _, items, report = opened("vstar", tmp_path)
    assert len(items) == 2
    assert [p.reason for p in report.problems] == ["media_missing"]
    assert "benchmark_media" in report.problems[0].message


def test_a_release_without_a_usable_row_is_an_error_that_says_why(tmp_path):
    MAKERS["vstar"](tmp_path / "release")
    with pytest.raises(ValueError, match=r"no usable row.*media_missing"):
        opened("vstar", tmp_path / "release", media=tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="benchmark_path"):
        opened("vstar", tmp_path / "nowhere")


def test_images_are_found_in_any_form(tmp_path):
    store = MediaStore(tmp_path, tmp_path / "unpacked")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.png").write_bytes(picture())
    forms = [
        picture(),
        {"bytes": picture(), "path": "b.png"},
        {"path": "/home/other/a.png", "bytes": None},
        "a.png",
        in_base64(),
        f"data:image/png;base64,{in_base64()}",
    ]
    assert {store.image(form).size for form in forms} == {(40, 30)}


def test_hub_rows_keep_images_undecoded(tmp_path, monkeypatch):
    raw = {"image": [picture()], "text": ["Which?\n(A) a\n(B) b"], "label": ["A"]}
    raw |= {"category": ["direct_attributes"], "question_id": ["1"]}
    table = datasets.Dataset.from_dict(raw).cast_column("image", datasets.Image())
    asked = []

    def load(*args, **kw):
        asked.append((args, kw))
        return table

    monkeypatch.setattr("datasets.load_dataset", load)
    hub = BENCHMARKS["vstar"].hub
    (row,) = hub_rows(hub)
    assert isinstance(row.raw["image"]["bytes"], bytes)
    assert asked[0][0][0] == "lmms-lab-encoder/vstar-bench" and asked[0][1]["split"] == "test"
    benchmark = BENCHMARKS["vstar"](None, MediaStore(None, tmp_path))
    (item,) = benchmark.items(Report())
    assert item.sample.options == ("a", "b")


def test_broken_files_are_told_and_do_not_end_the_reading(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\nno\n')
    found = [row for path in files_of(tmp_path, ["[ab].*"]) for row in rows_of(path)]
    assert [getattr(row, "reason", "row") for row in found] == ["bad_parquet", "row", "bad_json"]


def enormous():
    """The head of a PNG that says it is of 30000x30000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


@pytest.mark.parametrize(
    "held",
    [
        "\u00e9" * 2000,
        "A" * 2000,
        b"no image",
        enormous(),
        base64.b64encode(enormous() * 50).decode(),
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        [picture()],
        {"bytes": None},
        7,
    ],
)
def test_e21_e22_what_is_no_image_is_refused_and_leaves_no_file(tmp_path, held):
    with pytest.raises(Refused, match=r"media_(missing|unreadable)"):
        MediaStore(None, tmp_path).image(held)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_row_without_any_image_is_left_out(tmp_path):
    MAKERS["visual_probe"](tmp_path)
    path = sorted(tmp_path.rglob("val.json"))[0]
    rows = json.loads(path.read_text())
    write_json(path, [*rows, rows[0] | {"images": []}])
    _, items, report = opened("visual_probe", tmp_path)
    assert len(items) == COUNTS["visual_probe"]
    assert [p.reason for p in report.problems] == ["media_missing"]


def test_rows_of_another_form_are_left_out_and_the_others_are_read(tmp_path):
    MAKERS["lvbench"](tmp_path / "l")
    (path,) = (tmp_path / "l").rglob("video_info.meta.jsonl")
    line = json.loads(path.read_text())
    write_lines(path, [line | {"qa": [*line["qa"], "no", None, ["a"]]}])
    _, items, report = opened("lvbench", tmp_path / "l")
    assert len(items) == len(line["qa"]) and [p.reason for p in report.problems] == ["bad_row"] * 3
    MAKERS["wemath"](tmp_path / "w")
    path = tmp_path / "w" / "testmini.json"
    rows = json.loads(path.read_text())
    write_json(path, [*rows, rows[0] | {"ID": "5"}, rows[0] | {"ID": "3steps_9"}])
    _, items, report = opened("wemath", tmp_path / "w")
    assert len(items) == len(rows) and [p.reason for p in report.problems] == ["bad_key"] * 2


def test_a_relative_error_needs_a_true_number_above_0(tmp_path):
    MAKERS["vsi_bench"](tmp_path)
    (path,) = tmp_path.rglob("test*")
    rows = [row.raw for row in rows_of(path)]
    numeric = next(row for row in rows if row["question_type"] == "object_counting")
    odd = [numeric | {"id": f"odd{i}", "ground_truth": t} for i, t in enumerate(("0", "-3", "x"))]
    write_lines(tmp_path / "test.jsonl", [*rows, *odd])
    _, items, report = opened("vsi_bench", tmp_path)
    assert len(items) == len(rows) and [p.reason for p in report.problems] == ["no_number"] * 3


def test_a_packed_file_is_to_be_unpacked(tmp_path):
    (tmp_path / "test.json.gz").write_bytes(b"\x1f\x8b no")
    (problem,) = rows_of(tmp_path / "test.json.gz")
    assert problem.reason == "packed_file" and "Unpack" in problem.message


def test_half_a_character_in_a_row_is_no_reason_to_stop(tmp_path):
    MAKERS["lvbench"](tmp_path)
    (path,) = tmp_path.rglob("video_info.meta.jsonl")
    line = json.loads(path.read_text())
    line["qa"][0] |= {
        "uid": "\ud83d",
        "question": "a\ud83d \U0001f600?\n(A) \ude00b\n(B) c",
        "answer": "A",
    }
    write_lines(path, [line])
    _, items, _ = opened("lvbench", tmp_path)
    sample = items[0].sample
    assert (sample.question, sample.options) == ("a\ufffd \U0001f600?", ("\ufffdb", "c"))
    assert sample.id.encode() and len(items) == len(line["qa"])
