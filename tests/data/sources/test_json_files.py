import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reframe_vl.data.formats import json_files
from reframe_vl.data.formats.json_files import Member, array_rows, json_rows, line_rows, members
from reframe_vl.data.formats.rows import Row
from reframe_vl.data.report import Problem

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("json") / "a.json"


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_arrays_and_objects_are_read_in_pieces_as_they_are_whole(path, monkeypatch, chunk) -> None:
    monkeypatch.setattr(json_files, "_CHUNK", chunk)

    @settings(max_examples=30)
    @given(ROWS, st.sampled_from([None, 1]), st.booleans())
    def check(rows, indent, ascii_only) -> None:
        text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
        path.write_text(text, encoding="utf-8")
        assert [row.raw for row in array_rows(path)] == rows
        named = {str(number): row for number, row in enumerate(rows)}
        path.write_text(json.dumps(named, indent=indent, ensure_ascii=ascii_only), "utf-8")
        assert list(members(path)) == [Member(key, value) for key, value in named.items()]

    check()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_of_unicode_are_read(path, encoding) -> None:
    path.write_text('[{"a": "ü 😀"}]', encoding)
    (row,) = json_rows(path)
    assert isinstance(row, Row) and row.raw == {"a": "ü 😀"}


def test_items_before_a_syntax_error_are_read_and_the_place_is_named(path) -> None:
    path.write_text('[{"a": 1}, {"a": 2}, {"a": }, {"a": 3}]')
    first, second, problem = array_rows(path)
    assert (first.raw, second.raw) == ({"a": 1}, {"a": 2})
    assert problem.reason == "bad_json" and "item 3" in problem.where


def test_a_repeated_key_is_refused_and_the_other_rows_are_read(path) -> None:
    text = ['{"a": 1}', '{"a": 1, "b": {"c": 1, "c": 2}}', '{"a": 2}']
    for read, whole in ((line_rows, "\n".join(text)), (array_rows, f"[{','.join(text)}]")):
        path.write_text(whole)
        first, problem, last = read(path)
        assert (first.raw, last.raw) == ({"a": 1}, {"a": 2})
        assert problem.reason == "repeated_key" and "'c'" in problem.message


def test_keys_of_the_outermost_object_may_repeat(path) -> None:
    path.write_text('{"a": 1, "a": 2}')
    assert list(members(path)) == [Member("a", 1), Member("a", 2)]


@pytest.mark.parametrize(
    "text", ["7", "[1]", "[[]]", '{"a": 1', '{"a" 1}', "{1: 2}", "[" * 9999, "nul", "{} {}"]
)
def test_what_is_no_row_is_a_problem(path, text) -> None:
    path.write_text(text)
    for read in (line_rows, array_rows):
        found = list(read(path))
        assert found and isinstance(found[-1], Problem)


def test_rows_are_read_one_by_one(path) -> None:
    path.write_text('[{"a": 1}, oops')
    rows = array_rows(path)
    assert next(rows).raw == {"a": 1}
    path.write_text('{"a": 1}\noops')
    rows = line_rows(path)
    assert next(rows).raw == {"a": 1}


@pytest.mark.parametrize("text", ['[{"a": 1}] [{"a": 2}]', '{"a": 1}\n{"b": 2}', '{"a": 1},'])
def test_what_follows_the_end_of_a_file_is_not_lost_silently(path, text) -> None:
    path.write_text(text)
    *found, problem = array_rows(path) if text[0] == "[" else members(path)
    assert len(found) == 1 and isinstance(problem, Problem) and problem.reason == "bad_json"
    assert "More follows" in problem.message
