import json

import pytest
from pipeline import measure
from planted import MEANT, plant

from reframe_vl.data.pipeline import STAGES


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def measured(work):
    return measure(plant(num_sound=8, num_each=6), work)


def test_each_planted_fault_is_caught_by_the_stage_meant_for_it_and_no_sound_record_is_lost(
    measured,
) -> None:
    rows, summary = measured
    assert {row["fault"] for row in rows} == MEANT.keys()
    assert all(row["recall"] == row["precision"] == 1 for row in rows), rows
    assert summary["sound_lost"] == 0


def test_every_stage_leaves_its_counts(measured, work) -> None:
    before = measured[1]["records"]
    for name in STAGES:
        manifest = json.loads((work / name / "manifest.json").read_text())
        rechecked = manifest["reasons"].get("dropped", {}).get("recheck_failed", 0)
        rechecked += manifest["counts"].get("changed", 0)
        assert manifest["complete"] and sum(manifest["counts"].values()) == before + rechecked
        before = manifest["counts"].get("kept", 0) + manifest["counts"].get("changed", 0)
