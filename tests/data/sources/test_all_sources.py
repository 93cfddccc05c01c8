"""What holds for every adapter."""

import copy
import gzip
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.sources.source_files import TINY, read, reasons, write
from reframe_vl.data import sources
from reframe_vl.data.records import Record, read_records, write_records
from reframe_vl.data.report import RecordError, Report
from reframe_vl.data.sources import SOURCES

CASES = [(name, files) for name, variants in TINY.items() for files in variants]
IDS = [f"{name}-{'-'.join(files)}" for name, files in CASES]
EACH = pytest.mark.parametrize(("name", "files"), CASES, ids=IDS)

ODD = [
    None,
    "",
    " ",
    "x",
    "-7",
    -1,
    0,
    10**30,
    10**400,
    1e308,
    0.5,
    math.nan,
    math.inf,
    True,
    [],
    [1],
    [1, 2, 3, 4],
    [[5, 2]],
    {},
    {"a": [1]},
    "\ud800",
    "a\0b",
]


def test_every_file_but_the_base_is_a_source_of_its_name_and_has_a_tiny_file() -> None:
    names = {path.stem for path in Path(sources.__file__).parent.glob("[!_]*.py")} - {"base"}
    assert names == SOURCES.keys() == TINY.keys()
    for name, source in SOURCES.items():
        assert source.name == name and source.licence and source.encoding


@EACH
def test_tiny_files_give_records_that_survive_the_record_file(tmp_path, name, files) -> None:
    records, report = read(tmp_path / "in", name, files)
    assert records and report.num_left_out == 0
    assert records[0].boxes or records[0].segments
    write_records(tmp_path / "r.jsonl", records)
    assert read_records(tmp_path / "r.jsonl") == records
    for record in records:
        assert record.source == name and record.native_encoding and record.licence
        stated = "\n".join(entry.note for entry in record.audit)
        unknown = record.media.size is None
        assert ("not known until the media are read" in stated) >= unknown


@EACH
def test_the_native_rows_come_back_through_the_record_file(tmp_path, name, files) -> None:
    paths = write(tmp_path, files)
    source = SOURCES[name](paths)
    rows = {row.place: row.raw for row in source.rows()}
    records = list(source.records(Report(strict=False)))
    write_records(tmp_path / "r.jsonl", records)
    back = read_records(tmp_path / "r.jsonl")
    assert [record.raw for record in back] == list(rows.values())
    for record, again in zip(records, back, strict=True):
        assert source.native(record) == source.native(again)


@EACH
def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path, name, files) -> None:
    plain, _ = read(tmp_path / "a", name, files)
    odd = {}
    for path in write(tmp_path / "a", files):
        odd[path.name] = b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n")
    if name == "voc":  # Its raw row is the text of the file.
        records, _ = read(tmp_path / "b", name, odd)
        assert [r.boxes for r in records] == [r.boxes for r in plain]
        return
    records, _ = read(tmp_path / "b", name, odd)
    assert records == plain


@EACH
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_files_of_windows_in_utf16_are_read_as_those_in_utf8(
    tmp_path, name, files, encoding
) -> None:
    plain, _ = read(tmp_path / "a", name, files)
    odd = {}
    for path in write(tmp_path / "a", files):
        odd[path.name] = f"\ufeff{path.read_text(encoding='utf-8')}".encode(encoding)
    records, report = read(tmp_path / "b", name, odd)
    assert report.num_left_out == 0
    assert [(r.question, r.boxes, r.segments) for r in records] == [
        (r.question, r.boxes, r.segments) for r in plain
    ]


@EACH
def test_a_compressed_file_is_named_once_with_what_to_do(tmp_path, name, files) -> None:
    odd = {path.name: gzip.compress(path.read_bytes()) for path in write(tmp_path, files)}
    records, report = read(tmp_path, name, odd)
    assert not records and reasons(report)["compressed"] is False
    found = [p for p in report.problems if p.reason == "compressed"]
    assert [p.where for p in found] == [str(tmp_path / file) for file in files]
    assert all("unpack it" in p.message for p in found)


@EACH
def test_a_folder_without_such_files_is_said(tmp_path, name, files) -> None:
    (tmp_path / "notes.md").write_text("no rows")
    report = Report()
    assert not list(SOURCES[name](tmp_path).records(report))
    (problem,) = report.problems
    assert (problem.reason, problem.where) == ("no_file", str(tmp_path))


@EACH
def test_a_whole_folder_can_be_given(tmp_path, name, files) -> None:
    expected, _ = read(tmp_path, name, files)
    assert list(SOURCES[name](tmp_path).records(Report())) == expected


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def changes(value: Any) -> Iterator[Any]:
    """The value with one part left out, or replaced by something odd."""
    # Each place gets a few of them in turn: fields of a kind stand side by side.
    turn = itertools.cycle(ODD)
    for path in places(value):
        for odd in [*itertools.islice(turn, 2), ...]:
            if not path:
                yield copy.copy(odd) if odd is not ... else None
                continue
            changed = copy.deepcopy(value)
            at = changed
            for key in path[:-1]:
                at = at[key]
            if odd is ...:
                del at[path[-1]]
            else:
                at[path[-1]] = odd
            yield changed


@EACH
def test_a14_e22_whatever_is_wrong_with_a_value_is_a_record_or_a_reasoned_rejection(
    tmp_path, name, files
) -> None:
    paths = write(tmp_path, files)
    for path in paths:
        text = path.read_text()
        if path.suffix in (".json", ".jsonl"):
            value = json.loads(text)
            odd_texts = map(json.dumps, changes(value))
        else:
            cut = sorted({*range(0, len(text), max(1, len(text) // 15)), len(text) - 1})
            odd_texts = iter(
                [text[:at] for at in cut]
                + [text[:at] + odd + text[at + 1 :] for at in cut for odd in ("\0", '"', ",")]
            )
        for odd_text in odd_texts:
            path.write_text(odd_text, encoding="utf-8")
            report = Report(log_level=0)
            records = list(SOURCES[name](paths).records(report))
            assert len(records) == report.num_kept
            for record in records:
                Record.model_validate_json(record.model_dump_json())
            assert all(p.reason and p.message and p.where for p in report.problems)
            assert (
                records
                or report.problems
                or odd_text.strip() in ("", "[]", "{}", '{"annotations": []}')
            )
        path.write_text(text, encoding="utf-8")


@EACH
def test_bytes_that_are_no_text_are_refused(tmp_path, name, files) -> None:
    for broken in (b"\xff\xfe\xfd\x00" * 9, b"\x80abc", b"[", b"{", b'[{"a": 1}, {"b"', b""):
        odd = dict.fromkeys(files, broken)
        records, report = read(tmp_path, name, odd)
        assert not records
        assert report.problems


@EACH
def test_strict_reading_stops_at_the_first_odd_row(tmp_path, name, files) -> None:
    broken = dict.fromkeys(files, b"\x80abc")
    with pytest.raises(RecordError, match=str(tmp_path)):
        read(tmp_path, name, broken, strict=True)


@EACH
def test_the_same_row_twice_is_one_record(tmp_path, name, files) -> None:
    once, _ = read(tmp_path / "a", name, files)
    paths = write(tmp_path / "a", files)
    report = Report()
    again = [path for path in paths if path.name != "video_meta.json" and path.suffix != ".pkl"]
    twice = list(SOURCES[name]([*paths, *again]).records(report))
    assert [r.id for r in twice] == [r.id for r in once]
    assert report.num_left_out >= len(once)
