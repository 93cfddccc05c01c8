import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from reframe_vl.data.records import read_records

SCRIPT = Path(__file__).parents[1] / "src" / "build_data.py"
ROW = {
    "question": "What is the total?",
    "answer": "9.00",
    "image": "a.png",
    "width": 100,
    "height": 80,
    "bboxs": [[10, 20, 30, 40]],
    "split": "train",
}


def build(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *overrides], cwd=folder, capture_output=True, text=True
    )


@pytest.fixture
def receipts(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (100, 80)).save(tmp_path / "images" / "a.png")
    rows = [ROW, {**ROW, "answer": "1", "bboxs": [[801, 497, 1017, 838]]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_builds_a_record_file_and_counts_what_was_left_out(receipts: Path) -> None:
    done = build(
        receipts,
        "source=visual_cot_sroie",
        "annotations=rows.jsonl",
        "images=images",
        "out=built.jsonl",
    )
    assert done.returncode == 0, done.stderr
    (record,) = read_records(receipts / "built.jsonl")
    assert record.media.path == "images/a.png"
    assert record.to_sample(receipts).media.size == (100, 80)
    assert "wrong_scale" in done.stdout
    assert sorted(p.name for p in receipts.iterdir()) == ["built.jsonl", "images", "rows.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["source=visual_cot_sroie"], "Add annotations=… images=… out=…"),
        (["strict=true"], "line 2"),
        (["source=nobody"], "choose one of visual_cot_sroie"),
        (["images=nowhere"], "give the folder"),
        (["out=images/../rows.jsonl"], "would be overwritten"),
        (["out=images/a.png"], "would be overwritten"),
        (["out=images"], "is a folder"),
    ],
)
def test_mistakes_are_answered_with_a_sentence_and_nothing_is_written(
    receipts: Path, overrides: list[str], sentence: str
) -> None:
    given = ["source=visual_cot_sroie", "annotations=rows.jsonl", "images=images", "out=b.jsonl"]
    before = {p: p.read_bytes() for p in receipts.rglob("*") if p.is_file()}
    given = [g for g in given if g.split("=")[0] not in {o.split("=")[0] for o in overrides}]
    done = build(receipts, *(overrides if "Add" in sentence else given + overrides))
    assert done.returncode == 1
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert {p: p.read_bytes() for p in receipts.rglob("*") if p.is_file()} == before
