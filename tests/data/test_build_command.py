import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from PIL import Image

import build_data
from build_data import BuildConfig, GridConfig, build, read_config
from clips import make_clip
from data.verifiers.endpoint_server import ChatServer, completion
from reframe_vl.data.pipeline import STAGES
from reframe_vl.data.records import read_records
from reframe_vl.data.report import RecordError
from reframe_vl.data.stages.store import read_rows

SCRIPT = Path(__file__).parents[2] / "src" / "build_data.py"
ROW = {
    "question": "What is the total?",
    "answer": "9.00",
    "image": "a.png",
    "width": 100,
    "height": 80,
    "bboxs": [[10, 20, 30, 40]],
    "split": "train",
}


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *overrides], cwd=folder, capture_output=True, text=True
    )


@pytest.fixture
def receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "media").mkdir()
    Image.new("RGB", (100, 80)).save(tmp_path / "media" / "a.png")
    rows = [ROW, {**ROW, "answer": "1", "bboxs": [[801, 497, 1017, 838]]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.jsonl").write_text("")
    (tmp_path / "other.png").write_bytes(b"")
    (tmp_path / "a.txt").write_text("a file")
    (tmp_path / "notes.html").write_text("<h1>notes</h1>")
    (tmp_path / "test.txt").write_text("AB12C 0.5 1##opens\nAB12C 5 1##opens\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**changes: Any) -> BuildConfig:
    fields: dict[str, Any] = {
        "sources": ["visual_cot"],
        "annotations": "rows.jsonl",
        "media": "media",
        "out": Path("built.jsonl"),
        "grid": GridConfig(2.0, 64),
        "max_frames": 8,
        "strict": False,
    }
    return BuildConfig(**fields | changes)


def test_several_sources_make_one_file_of_images_and_videos(receipts: Path) -> None:
    make_clip(receipts / "media" / "AB12C.mp4", n=20)
    before = {path.name for path in receipts.iterdir()}
    done = command(
        receipts,
        "sources=[visual_cot,charades_sta]",
        "annotations={visual_cot:rows.jsonl,charades_sta:[test.txt]}",
        "media=media",
        "out=built.jsonl",
        "grid.max_frames=4",
    )
    assert done.returncode == 0, done.stderr
    image, video = read_records(receipts / "built.jsonl")
    assert (image.source, image.media.path) == ("visual_cot", "media/a.png")
    assert (video.source, len(video.media.timestamps_s)) == ("charades_sta", 4)
    assert image.to_sample(receipts).media.size == (100, 80)
    assert video.to_sample(receipts).evidence.segments
    for cell in (
        "visual_cot",
        "charades_sta",
        "image, beneficial",
        "pool: segment_reversed",
        "pool: wrong_scale",
    ):
        assert cell in done.stdout
    assert "rows" in done.stderr  # The progress bars.
    assert {path.name for path in receipts.iterdir()} == before | {"built.jsonl", "built.html"}
    page = (receipts / "built.html").read_text(encoding="utf-8")
    assert page.count("<figure><img ") == 2 and "What is the total?" in page


def test_media_are_not_needed_where_the_annotation_says_enough(receipts: Path) -> None:
    build(config(media=None))
    (record,) = read_records(receipts / "built.jsonl")
    assert record.media.path == "a.png" and record.evidence is not None
    assert not (receipts / "built.html").exists()


def test_rows_in_are_those_kept_and_those_dropped(receipts: Path, capsys) -> None:
    build(config())
    table = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    counts = {label.strip(): int(number) for label, number in table}
    assert counts == {
        "in": 2,
        "kept": 1,
        "image, beneficial": 1,
        "dropped": 1,
        "pool: wrong_scale": 1,
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strict": True}, "line 2"),
        ({"sources": ["nobody"]}, "nobody is unknown; choose one or more of"),
        ({"sources": []}, "choose one or more of"),
        ({"sources": ["visual_cot", "coco"]}, "need their annotations by name"),
        ({"annotations": {"coco": "rows.jsonl"}}, "coco is not among the sources"),
        ({"annotations": {}}, "has no file of visual_cot"),
        ({"annotations": "nowhere"}, "give the annotation file"),
        ({"annotations": "test.txt"}, "No record was made"),
        ({"media": "nowhere"}, "give the folder"),
        ({"grid": GridConfig(0.0, 64)}, "above 0"),
        ({"out": Path("media/../rows.jsonl")}, "would be overwritten"),
        ({"out": Path("media/a.png")}, "would be overwritten"),
        ({"out": Path("other.png")}, "is no name of a record file"),
        ({"out": Path("page.html")}, "is no name of a record file"),
        ({"out": Path("notes.jsonl")}, r"notes.html is no page of an earlier build.*sheet=0"),
        ({"out": Path("e.jsonl"), "held_out": ["e.jsonl"]}, "would be overwritten"),
        ({"out": Path("work/media.jsonl"), "work": Path("work")}, "outside of it"),
        ({"out": Path("set.jsonl"), "annotations": "."}, "in the folder of annotations"),
        ({"out": Path("a.txt/set.jsonl")}, r"cannot be written \(.*a folder that can be written"),
        ({"stages": ["finalise"], "held_out": ["e.jsonl"]}, "held_out= is used by the stage pool"),
        ({"verifiers": {"a": {"url": "u", "model": "m"}}}, "verifiers= are asked by the stages"),
        ({"media": {"visual_cot": ""}}, "is no folder"),
        ({"annotations": [""]}, "names no files"),
        ({"out": Path("media")}, "is a folder"),
    ],
)
def test_mistakes_are_answered_with_a_sentence_and_nothing_is_written(
    receipts: Path, changes: dict[str, Any], sentence: str
) -> None:
    before = {p: p.read_bytes() for p in receipts.rglob("*") if p.is_file()}
    with pytest.raises((SystemExit, RecordError), match=sentence):
        build(config(**changes))
    assert {p: p.read_bytes() for p in receipts.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "Add annotations=… out=… sources=…"),
        (
            ["sources=[visual_cot]", "annotations=rows.jsonl", "out=b.jsonl", "strict=true"],
            "Nothing was written",
        ),
    ],
)
def test_the_command_ends_with_a_sentence_instead_of_a_traceback(
    receipts: Path, overrides: list[str], sentence: str
) -> None:
    done = command(receipts, *overrides)
    assert done.returncode == 1
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (receipts / "b.jsonl").exists()


def knows_the_total_from_the_picture(number: int, body: dict[str, Any]):
    """But not from a reduced one."""
    content = body["messages"][0]["content"]
    text = "unknown"
    if len(content) > 1:
        picture = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
        text = "9.00" if Image.open(io.BytesIO(picture)).width in (100, 30) else "unknown"
    return 200, {}, completion(f"<answer>{text}</answer>")


def test_a_build_with_verifiers_goes_on_where_it_was_when_the_endpoint_was_down(
    receipts: Path, capsys
) -> None:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (80, 100, 3), np.uint8)).save(receipts / "media" / "a.png")
    server = ChatServer(knows_the_total_from_the_picture).start()
    server.stop()
    verifier = {"url": server.url, "model": "m", "max_tries": 1, "price_in": 1.0}
    asked = config(
        stages=list(STAGES),
        work=Path("work"),
        verifiers={"strong": verifier},
    )
    with pytest.raises(RecordError, match=r"shortcut: 1 records or more .*connection"):
        build(asked)
    assert not (receipts / "built.jsonl").exists()
    server.start()
    build(asked)
    (record,) = read_records(receipts / "built.jsonl")
    assert [entry.stage for entry in record.audit] == [
        "pool",
        "shortcut",
        "audit",
        "diagnose",
        "finalise",
    ]
    assert record.evidence is not None and record.tool_calls[0].name == "CropImage"
    times = len(server.bodies)
    assert times >= 3
    build(asked)
    server.stop()
    assert len(server.bodies) == times
    manifest = json.loads((receipts / "work" / "audit" / "manifest.json").read_text())
    assert manifest["asked"]["strong"]["cost"] > 0


def test_media_of_evaluations_are_kept_out(receipts: Path, capsys) -> None:
    build(config(out=Path("media/evaluation.jsonl")))
    with pytest.raises(RecordError, match=r"No record was made \(.*evaluation_id"):
        build(config(held_out=["media/evaluation.jsonl"]))


def test_copies_are_found_in_the_sources_with_media_when_another_has_none(
    receipts: Path, caplog
) -> None:
    (receipts / "media" / "b.png").write_bytes((receipts / "media" / "a.png").read_bytes())
    same = [ROW, {**ROW, "image": "b.png"}]
    (receipts / "rows.jsonl").write_text("\n".join(map(json.dumps, same)))
    build(
        config(
            sources=["visual_cot", "charades_sta"],
            annotations={"visual_cot": "rows.jsonl", "charades_sta": "test.txt"},
            media={"visual_cot": "media"},
            stages=["pool"],
        )
    )
    assert [r.source for r in read_records(receipts / "built.jsonl")] == [
        "visual_cot",
        "charades_sta",
    ]
    assert "No media= of charades_sta" in caplog.text


def test_a_build_replaces_the_file_and_the_page_of_an_earlier_one_whatever_their_name(
    receipts: Path, capsys
) -> None:
    for _ in range(2):
        build(config(out=Path("o[/v1]/set.jsonl")))
    assert "o[/v1]/set.html" in capsys.readouterr().out
    assert read_records(receipts / "o[/v1]" / "set.jsonl")


@pytest.mark.parametrize(("work", "said"), [(None, "nothing was kept"), ("w", "goes on from")])
def test_a_build_that_is_interrupted_says_whether_it_can_go_on(
    receipts: Path, monkeypatch: pytest.MonkeyPatch, work: str | None, said: str
) -> None:
    def interrupted(_: BuildConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_data, "build", interrupted)
    given = OmegaConf.load(SCRIPT.parents[1] / "configs" / "data.yaml")
    given.update({"sources": ["coco"], "annotations": "a", "out": "b.jsonl", "work": work})
    with pytest.raises(SystemExit, match=f"Stopped.*{said}"):
        build_data.main.__wrapped__(given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": ["audit", "pool"]}, "each once and in this order"),
        ({"stages": ["pool", "audit"]}, "give media= and verifiers="),
        ({"stages": ["audit"], "verifiers": {"a": {"model": "m"}}}, "give url and model"),
        ({"stages": ["audit"], "verifiers": {"a": {"url": "u", "model": "m", "x": 1}}}, "price_in"),
        ({"held_out": ["nowhere.jsonl"]}, "give a record file of an evaluation"),
    ],
)
def test_mistakes_about_stages_are_answered_with_a_sentence(
    receipts: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SystemExit, match=sentence):
        build(config(**changes))
    assert not (receipts / "built.jsonl").exists()


# --------------------------------------------------------------------------- settings


def typed(receipts: Path, **changes: Any) -> BuildConfig:
    given = OmegaConf.load(SCRIPT.parents[1] / "configs" / "data.yaml")
    assert isinstance(given, DictConfig)
    fields = {"sources": ["visual_cot"], "annotations": "rows.jsonl", "out": "built.jsonl"}
    given.update(fields | changes)
    return read_config(given)


def test_one_name_may_stand_for_a_list_of_one(receipts: Path) -> None:
    read = typed(receipts, sources="visual_cot", stages="finalise", held_out="e.jsonl")
    assert (read.sources, read.stages, read.held_out) == (
        ["visual_cot"],
        ["finalise"],
        ["e.jsonl"],
    )
    done = command(
        receipts, "sources=visual_cot", "annotations=rows.jsonl", "out=built.jsonl", "stages=pool"
    )
    assert done.returncode == 0, done.stderr
    assert len(read_records(receipts / "built.jsonl")) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sources": 3}, r"sources=3: give one name or several, as in \[coco,voc\]"),
        ({"sources": {"a": 1}}, r"sources=\{'a': 1\}: give one name"),
        ({"sources": None}, "sources=None: give one name"),
        ({"sources": [["coco"]]}, r"sources=\[\['coco'\]\]: give one name"),
        ({"stages": 1}, r"stages=1: give .*\[pool,finalise\]"),
        ({"held_out": 1.5}, "held_out=1.5: give one record file or several"),
        ({"annotations": 3}, "annotations=3 names no files of visual_cot: give a file"),
        ({"annotations": []}, r"annotations=\[\] names no files"),
        ({"annotations": {"visual_cot": None}}, "annotations=None names no files"),
        ({"media": ["media"]}, r"media=\['media'\] is no folder"),
        ({"media": 3}, "media=3 is no folder"),
        ({"out": ["a"]}, r"out=\['a'\]: give the record file"),
        ({"grid": {"fps": "fast", "max_frames": 64}}, r"grid=\{'fps': 'fast'.*frames a second"),
        ({"grid": {"fps": 2.0, "max_frames": 0}}, "grid: max_frames is 0"),
        ({"strict": "maybe"}, "strict=maybe: give true or false"),
        ({"max_frames": 1.5}, "max_frames=1.5: give a whole number"),
        ({"max_frames": 0}, "max_frames=0: give a number of at least 1"),
        ({"batch_size": "all"}, "batch_size=all: give a whole number"),
        ({"sheet": -1}, "sheet=-1: give a number of at least 0"),
        ({"near_distance": "near"}, "near_distance=near: give a number, or null"),
        ({"near_distance": -1}, "near_distance=-1.0: give a number of at least 0"),
        ({"near_distance": float("nan")}, "near_distance=nan: give a number of at least 0"),
        ({"annotations": ""}, "annotations= is empty: give a file, a folder"),
        ({"media": ""}, "media= is empty: give the folder"),
        ({"work": ""}, "work= is empty: give a folder, or null"),
        ({"out": ""}, "out= is empty: give the record file"),
        ({"work": [1]}, r"work=\[1\]: give a folder, or null"),
    ],
)
def test_a_setting_of_a_wrong_kind_is_told_by_name_value_and_remedy(
    receipts: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((SystemExit, RecordError), match=sentence):
        build(typed(receipts, **changes))
    assert not (receipts / "built.jsonl").exists()


@pytest.mark.parametrize(
    ("verifiers", "sentence"),
    [
        ("strong", "verifiers=strong: give each a name"),
        ({"a": {"url": "u", "model": 3}}, r"verifiers\.a\.model is 3: give text"),
        ({"a": {"url": "u", "model": "m", "max_tries": "x"}}, "max_tries is 'x': give a whole"),
        ({"a": {"url": "u", "model": "m", "timeout_s": None}}, "timeout_s is None: give a number"),
        ({"a": {"url": "u", "model": "m", "extra": 3}}, "extra is 3: give further fields"),
    ],
)
def test_a_verifier_of_a_wrong_kind_is_told_in_a_sentence(
    receipts: Path, verifiers: Any, sentence: str
) -> None:
    with pytest.raises(SystemExit, match=sentence):
        build(config(stages=["audit"], work=Path("work"), verifiers=verifiers))


# --------------------------------------------------------------------------- a work folder again


def test_an_image_that_is_replaced_by_another_of_its_size_is_judged_anew(receipts: Path) -> None:
    image = receipts / "media" / "a.png"
    Image.new("L", (100, 80), 0).save(image.with_suffix(".bmp"))
    Image.new("L", (100, 80), 255).save(image.with_suffix(".gif"), "BMP")
    first, second = (image.with_suffix(s).read_bytes() for s in (".bmp", ".gif"))
    assert len(first) == len(second)
    keys = []
    for content in (first, first, second):
        # Unpacking and copying may keep the time of writing.
        image.write_bytes(content)
        os.utime(image, (1, 1))
        build(config(work=Path("work")))
        (row,) = read_rows(receipts / "work" / "pool" / "records.parquet")
        keys.append(row.outcome.facts["key"])
    assert keys == [hashlib.sha256(c).hexdigest()[:32] for c in (first, first, second)]
