import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.stages.scripted import Scripted, record
from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.pipeline import (
    STAGES,
    PipelineSettings,
    dispositions,
    finished_records,
    make_stages,
    run_pipeline,
)
from reframe_vl.data.stages.base import Stage, decided, undecided
from reframe_vl.data.stages.runner import Unfinished
from reframe_vl.data.stages.shortcut import ShortcutSettings, shortcut_stage
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Query
from reframe_vl.data.verifiers.cache import AnswerCache

RECORDS = [record(number) for number in range(10)]


def manifest(work: Path, stage: str) -> dict:
    return json.loads((work / stage / "manifest.json").read_text())


def odd_is_told(query: Query) -> str:
    number = query.question.rstrip("?").split()[-1]
    return number if int(number) % 2 else "unknown"


def test_each_stage_writes_parquet_and_a_manifest_and_reads_that_of_the_one_before(tmp_path):
    verifier = Scripted(odd_is_told)
    stages = [
        *make_stages(["pool"], PipelineSettings()),
        shortcut_stage([Asker(verifier)], ShortcutSettings()),
        *make_stages(["finalise"], PipelineSettings()),
    ]
    run_pipeline(stages, RECORDS, tmp_path, batch_size=3)
    names = ["pool", "shortcut", "finalise"]
    kept = list(finished_records(tmp_path, "finalise"))
    assert [r.id for r in kept] == [f"s/{n}" for n in range(0, 10, 2)]
    assert all(r.evidence and r.evidence.version == EVIDENCE_VERSION for r in kept)
    assert [e.stage for e in kept[0].audit] == ["shortcut", "finalise"]
    found = manifest(tmp_path, "shortcut")
    assert found["complete"] and found["counts"] == {"kept": 5, "dropped": 5}
    assert found["reasons"] == {"dropped": {"text_answerable": 5}, "kept": {"none": 5}}
    assert found["config"] == {"orders": 4} and found["asked"]["scripted"]["answered"] == 10
    assert found["input"]["file"] == "pool" and len(found["input"]["sha256"]) == 64
    table = pq.read_table(tmp_path / "shortcut" / "records.parquet")
    assert table.num_rows == 10 and set(table["verdict"].to_pylist()) == {"kept", "dropped"}
    assert not (tmp_path / "shortcut" / "parts").exists()
    by_id = {d.id: (d.stage, d.verdict, d.reason) for d in dispositions(tmp_path, names)}
    assert by_id["s/1"] == ("shortcut", "dropped", "text_answerable")
    assert by_id["s/2"] == ("finalise", "kept", "")


def test_a_verifier_that_fails_leaves_records_open_and_the_next_run_goes_on_with_those(tmp_path):
    down = {"s": {3, 4}}

    def say(query: Query) -> str | None:
        number = int(query.question.rstrip("?").split()[-1])
        return None if number in down["s"] else odd_is_told(query)

    def run(verifier: Scripted) -> None:
        stages = [
            *make_stages(["pool"], PipelineSettings()),
            shortcut_stage([Asker(verifier)], ShortcutSettings()),
        ]
        run_pipeline(stages, RECORDS, tmp_path, batch_size=4)

    with pytest.raises(Unfinished, match=r"2 records or more .*run the same command"):
        run(Scripted(say))
    found = manifest(tmp_path, "shortcut")
    assert not found["complete"] and found["without_verdict"] == 2
    assert found["asked"]["scripted"]["failures"] == {"down": 2}
    assert not (tmp_path / "shortcut" / "records.parquet").exists()
    down["s"] = set()
    again = Scripted(say)
    run(again)
    assert sorted(q.question for q in again.asked) == ["What is number 3?", "What is number 4?"]
    found = manifest(tmp_path, "shortcut")
    assert found["complete"] and sum(found["counts"].values()) == 10
    assert found["asked"]["scripted"]["answered"] == 10  # Of both runs.
    ids = pq.read_table(tmp_path / "shortcut" / "records.parquet")["id"].to_pylist()
    assert ids == [f"s/{n}" for n in range(10)]
    unneeded = Scripted(say)
    run(unneeded)
    assert unneeded.asked == []


def test_when_nothing_is_answered_the_others_are_not_asked(tmp_path):
    verifier = Scripted(lambda query: None)
    stage = shortcut_stage([Asker(verifier)], ShortcutSettings())
    with pytest.raises(Unfinished):
        run_pipeline([stage], RECORDS, tmp_path, batch_size=3)
    assert len(verifier.asked) == 3


def test_a_run_that_is_killed_keeps_batches_and_answers(tmp_path):
    def killed(query: Query) -> str:
        if len(verifier.asked) > 6:
            raise KeyboardInterrupt
        return odd_is_told(query)

    cache = AnswerCache(tmp_path / "answers.sqlite")
    verifier = Scripted(killed)
    stage = shortcut_stage([Asker(verifier, cache)], ShortcutSettings())
    with pytest.raises(KeyboardInterrupt):
        run_pipeline([stage], RECORDS, tmp_path, batch_size=4)
    assert len(list((tmp_path / "shortcut" / "parts").iterdir())) == 1
    again = Scripted(odd_is_told)
    stage = shortcut_stage([Asker(again, cache)], ShortcutSettings())
    run_pipeline([stage], RECORDS, tmp_path, batch_size=4)
    cache.close()
    assert len(again.asked) == 4  # Six of ten were answered before.
    assert len(dispositions(tmp_path, ["shortcut"])) == 10


@pytest.mark.parametrize("change", ["records", "settings", "verifier"])
def test_results_of_other_inputs_settings_or_verifiers_are_replaced(tmp_path, change):
    first = Scripted(odd_is_told)
    run_pipeline([shortcut_stage([Asker(first)], ShortcutSettings())], RECORDS, tmp_path)
    second = Scripted(odd_is_told)
    if change == "verifier":
        second.identity = "another"
    records = RECORDS[:-1] if change == "records" else RECORDS
    settings = ShortcutSettings(orders=2 if change == "settings" else 4)
    run_pipeline([shortcut_stage([Asker(second)], settings)], records, tmp_path)
    assert len(second.asked) == len(records)


def test_records_that_a_stage_dropped_do_not_reach_the_next_but_for_those_it_rechecks(tmp_path):
    def judge(records):
        return [
            decided(r, "a", "dropped" if r.raw["number"] % 2 else "kept", "", "") for r in records
        ]

    seen = []

    def note(records):
        seen.extend(r.raw["number"] for r in records)
        return [decided(r, "b", "kept", "", "") for r in records]

    first = Stage("a", "1", {}, judge)
    run_pipeline([first, Stage("b", "1", {}, note)], RECORDS, tmp_path / "x")
    assert seen == [0, 2, 4, 6, 8]
    seen.clear()
    rechecking = Stage("b", "1", {}, note, rechecks=frozenset({""}))
    run_pipeline([first, rechecking], RECORDS, tmp_path / "y")
    assert seen == list(range(10))


def test_an_open_record_is_never_written_as_judged(tmp_path):
    stage = Stage("a", "1", {}, lambda records: [undecided(r) for r in records])
    with pytest.raises(Unfinished):
        run_pipeline([stage], RECORDS, tmp_path)
    assert not list((tmp_path / "a").glob("parts/*"))


@pytest.mark.parametrize("names", [[], ["finalise", "pool"], ["pool", "pool"], ["poll"]])
def test_stages_stand_in_their_order(names):
    with pytest.raises(ValueError, match="each once and in this"):
        make_stages(names, PipelineSettings())


def test_stages_that_ask_need_media_and_verifiers():
    with pytest.raises(ValueError, match="shortcut shows the media to verifiers"):
        make_stages(STAGES, PipelineSettings())
