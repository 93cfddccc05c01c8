"""No kill, second run or torn file loses a record."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_data import BuildConfig, GridConfig, build
from data.stages.scripted import record
from reframe_vl.data.pipeline import dispositions, run_pipeline
from reframe_vl.data.records import Record
from reframe_vl.data.report import RecordError
from reframe_vl.data.stages import runner
from reframe_vl.data.stages.base import Outcome, Stage, decided, undecided
from reframe_vl.data.stages.store import (
    Placed,
    StageFolder,
    only_run,
    read_column,
    read_rows,
    write_rows,
)
from reframe_vl.data.verifiers.base import Reply
from reframe_vl.data.verifiers.cache import AnswerCache

RECORDS = [record(number) for number in range(10)]


class Judge:
    """Keeps all, but for those that stay open; knows what it was asked."""

    def __init__(self, *still_open: int) -> None:
        self.still_open = still_open
        self.asked: list[int] = []

    def __call__(self, records: list[Record]) -> list[Outcome]:
        numbers = [r.raw["number"] for r in records]
        self.asked += numbers
        return [
            undecided(r) if number in self.still_open else decided(r, "a", "kept", "", "")
            for number, r in zip(numbers, records, strict=True)
        ]


def run(work: Path, judge: Judge, batch_size: int = 2) -> None:
    run_pipeline([Stage("a", "1", {}, judge)], RECORDS, work, batch_size)


def all_are_there(work: Path) -> bool:
    positions = [row[0] for row in read_column(work / "a" / "records.parquet", "position")]
    manifest = StageFolder(work / "a").manifest()
    return (
        positions == list(range(10))
        and manifest["complete"]
        and manifest["counts"] == {"kept": 10}
        and len(dispositions(work, ["a"])) == 10
        and not (work / "a" / "parts").exists()
    )


def build_in(folder: Path, **changes) -> None:
    (folder / "rows.jsonl").write_text("")
    fields = {
        "sources": ["visual_cot"],
        "annotations": str(folder / "rows.jsonl"),
        "media": None,
        "out": folder / "built.jsonl",
        "grid": GridConfig(2.0, 64),
        "work": folder / "work",
    }
    build(BuildConfig(**fields | changes))


def test_a_second_build_in_the_same_work_folder_is_refused_until_the_first_is_over(tmp_path):
    work = tmp_path / "work"
    with only_run(work):
        before = sorted(work.iterdir())
        with pytest.raises(RecordError, match=r"work=.*work is in use by another run: wait"):
            build_in(tmp_path)
        assert sorted(work.iterdir()) == before
    with pytest.raises(RecordError, match="No record was made"):  # The rows are empty.
        build_in(tmp_path)


def test_the_lock_of_another_process_holds_and_goes_with_it_when_it_is_killed(tmp_path):
    held = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", held, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(RecordError, match="in use by another run"), only_run(tmp_path):
                pass
        finally:
            other.kill()
    with only_run(tmp_path):
        pass


def test_a_kill_before_the_manifest_is_complete_leaves_all_parts(tmp_path, monkeypatch):
    write_manifest = StageFolder.write_manifest

    def killed(self: StageFolder, manifest: dict) -> None:
        if manifest["complete"]:
            raise KeyboardInterrupt
        write_manifest(self, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(StageFolder, "write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, Judge())
    assert len(StageFolder(tmp_path / "a").parts()) == 5
    again = Judge()
    run(tmp_path, again)
    assert again.asked == [] and all_are_there(tmp_path)


def test_a_kill_while_parts_are_removed_loses_nothing(tmp_path, monkeypatch):
    def killed(folder: Path) -> None:
        (folder / "000000.parquet").unlink()
        (folder / "000003.parquet").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, Judge())
    assert len(StageFolder(tmp_path / "a").parts()) == 3
    again = Judge()
    run(tmp_path, again)
    assert again.asked == [] and all_are_there(tmp_path)


def test_a_missing_part_is_judged_again_and_no_other_is_overwritten(tmp_path):
    with pytest.raises(runner.Unfinished):
        run(tmp_path, Judge(9))
    own = StageFolder(tmp_path / "a")
    own.parts()[1].unlink()
    again = Judge()
    run(tmp_path, again)
    assert again.asked == [2, 3, 9] and all_are_there(tmp_path)


def test_parts_are_numbered_on_from_the_highest(tmp_path):
    own = StageFolder(tmp_path)
    for number in range(3):
        own.add_part([Placed(number, Outcome(RECORDS[number], "kept"))])
    own.parts()[0].unlink()
    own.add_part([Placed(3, Outcome(RECORDS[3], "kept"))])
    assert [part.name for part in own.parts()] == [f"00000{n}.parquet" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lost", r"a: 2 of 10 records are lost and 0 .*remove the folder"),
        ("twice", r"a: 0 of 10 records are lost and 2 .*remove the folder"),
    ],
)
def test_a_stage_that_lost_records_or_has_some_twice_is_not_called_done(
    tmp_path, monkeypatch, change, said
):
    judge = runner._judge

    def disturbed(stage, given, own, *more):
        missing = judge(stage, given, own, *more)
        first = own.parts()[0]
        if change == "lost":
            first.unlink()
        else:
            shutil.copy(first, first.with_stem("000077"))
        return missing

    monkeypatch.setattr(runner, "_judge", disturbed)
    with pytest.raises(RecordError, match=said):
        run(tmp_path, Judge())
    own = StageFolder(tmp_path / "a")
    assert not own.manifest()["complete"] and not own.records.exists()


def test_a_folder_that_is_called_done_and_lacks_records_is_refused(tmp_path):
    run(tmp_path, Judge())
    records = StageFolder(tmp_path / "a").records
    write_rows(records, list(read_rows(records))[:7])
    with pytest.raises(RecordError, match=r"a: 3 of 10 records are lost .*remove the folder"):
        run(tmp_path, Judge())
    shutil.rmtree(tmp_path / "a")
    run(tmp_path, Judge())
    assert all_are_there(tmp_path)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_size_below_one_is_refused_before_anything_is_written(tmp_path, batch_size):
    said = f"batch_size={batch_size}: give 1 or more"
    with pytest.raises(RecordError, match=said):
        run(tmp_path / "work", Judge(), batch_size)
    with pytest.raises(RecordError, match=said):
        build_in(tmp_path, batch_size=batch_size)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("torn", [b"", b'{"stage": "a", "vers', b"\xff\xfe\x00", b"null", b"[1]"])
@pytest.mark.parametrize("done", [True, False])
def test_a_manifest_that_cannot_be_read_counts_as_none(tmp_path, torn, done):
    if done:
        run(tmp_path, Judge())
    else:
        with pytest.raises(runner.Unfinished):
            run(tmp_path, Judge(9))
    (tmp_path / "a" / "manifest.json").write_bytes(torn)
    again = Judge()
    run(tmp_path, again)
    assert again.asked == list(range(10)) and all_are_there(tmp_path)


def test_a_kill_while_the_manifest_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    own = StageFolder(tmp_path)
    own.write_manifest({"complete": False})

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        own.write_manifest({"complete": True})
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"complete": False}


def test_a_damaged_result_is_named_with_what_to_do(tmp_path):
    run(tmp_path, Judge())
    file = tmp_path / "a" / "records.parquet"
    whole = file.read_bytes()
    for content in (whole[:-20], b"", whole[:4] + b"\xff" * 300 + whole[304:]):
        file.write_bytes(content)
        with pytest.raises(RecordError, match=r"a/records\.parquet is damaged.*remove its folder"):
            list(read_rows(file))
    with pytest.raises(RecordError, match="is damaged"):
        file.write_bytes(whole[:-20])
        run(tmp_path, Judge())


def test_a_damaged_file_of_answers_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"no database" * 99)
    with pytest.raises(RecordError, match=r"answers\.sqlite cannot be used .*remove it"):
        AnswerCache(path)
    path.unlink()
    cache = AnswerCache(path)
    cache.put("k", Reply("that"))
    cache._do("UPDATE answers SET reply = '{'")
    assert cache.get("k") is None and cache.get("other") is None
    cache.close()
