import json
import os
from pathlib import Path

import pytest

from data.sources.source_files import CHARADES_CAPTION, VISUAL_COT, read, reasons, write
from reframe_vl.data.formats.json_files import json_rows, line_rows
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES


def test_an_annotation_file_whose_name_is_not_of_utf8_is_reported_and_the_others_read(
    tmp_path,
) -> None:
    files = {"a.jsonl": [VISUAL_COT], os.fsdecode(b"b\xff.jsonl"): [VISUAL_COT]}
    write(tmp_path, files)
    report = Report()
    assert len(list(SOURCES["visual_cot"](tmp_path).records(report))) == 1
    assert reasons(report) == {"bad_name": False}
    str(report.problems[0]).encode()


def test_an_annotation_file_that_may_not_be_read_is_reported_and_the_others_read(
    tmp_path, monkeypatch
) -> None:
    write(tmp_path, {"a.jsonl": [VISUAL_COT], "b.jsonl": [VISUAL_COT]})
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "b.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    report = Report()
    assert len(list(SOURCES["visual_cot"](tmp_path).records(report))) == 1
    assert reasons(report) == {"unreadable_file": False}


@pytest.mark.parametrize("indent", [1, None])
def test_a_value_over_many_lines_is_one_problem(tmp_path, indent) -> None:
    path = tmp_path / "a.json"
    text = json.dumps({"data": [VISUAL_COT] * 3}, indent=1)
    path.write_text(text if indent else text.replace('{\n "data"', '{"data"', 1))
    (problem,) = json_rows(path)
    assert problem.reason == "bad_json" and "an object a line" in problem.message
    path.write_text(json.dumps([VISUAL_COT] * 3, indent=indent or 0))
    assert len(list(line_rows(path))) == 1 and len(list(json_rows(path))) == 3


def test_lines_after_a_first_one_that_was_cut_off_are_read(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": [\n{"a": 1}\n{"a": 2}\n')
    assert [getattr(row, "reason", None) for row in json_rows(path)] == ["bad_json", None, None]


@pytest.mark.parametrize("name", ["AB12C", "AB12C.mp4", "AB12C.MP4", "AB12C.mkv"])
def test_a_video_named_with_its_suffix_gets_no_second_one(tmp_path, name) -> None:
    rows = {"test.json": {"annotations": [{**CHARADES_CAPTION, "image_id": name}]}}
    (record,), _ = read(tmp_path, "charades_sta", rows)
    assert record.media.path == (name if "." in name else f"{name}.mp4")
