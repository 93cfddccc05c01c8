"""Real excerpts of every source with something wrong in them, through the pipeline."""

import random
import shutil

import pytest

from data.sources.mutations import damaged
from reframe_vl.data.pipeline import PipelineSettings, make_stages
from reframe_vl.data.records import Record, read_records, write_records
from reframe_vl.data.report import Report
from reframe_vl.data.sources import SOURCES

TIMES = 4
"""So often each excerpt is damaged, each time in another way."""

EXCERPTS = {
    "activitynet_captions": ["annotations/activitynet_captions_timer1_val2.json"],
    "cg_bench": ["annotations/cgbench_mini.json", "annotations/cgbench_video_meta.json"],
    "charades_sta": ["annotations/charades_sta_test_lighthouse.jsonl"],
    "charades_sta captions": ["annotations/charades_sta_timechat_gt.json"],
    "coco": ["images/sahi/terrain2_coco.json"],
    "columns": ["annotations/refcoco_unc_val.jsonl"],
    "nextgqa": ["annotations/nextgqa/val.csv", "annotations/nextgqa/gsub_val.json"],
    "qvhighlights": ["annotations/qvhighlights_val.jsonl"],
    "refcoco": ["annotations/refcoco_unc_val.jsonl"],
    "rextime": ["annotations/rextime_val.jsonl"],
    "tvqa_plus": ["annotations/tvqa_plus_val.json"],
    "visdrone": ["annotations/visdrone_coco.json"],
    "visual_cot": ["annotations/visual_cot_vsr_train.jsonl"],
    "visual_cot_benchmark": [
        "annotations/visual_cot_bench_gqa.json",
        "annotations/visual_cot_benchdet_gqa.jsonl",
    ],
    "visual_cot_sroie": ["annotations/visual_cot_sroie.jsonl"],
    "voc": ["images/raccoon/raccoon-1.xml", "images/bccd/BloodImage_00011.xml"],
    "youcook2": ["annotations/youcook2_val.json"],
}
WITH_IMAGES = {"coco": "sahi", "visual_cot_sroie": "sroie", "voc": ""}
"""Folders of those whose images are at hand."""


def test_every_source_is_tried() -> None:
    assert {case.split()[0] for case in EXCERPTS} == SOURCES.keys()


@pytest.mark.parametrize("case", EXCERPTS)
def test_a14_e22_each_row_of_a_damaged_file_is_a_record_or_a_reasoned_rejection(
    tmp_path, shared_data, case
) -> None:
    name = case.split()[0]
    for seed in range(TIMES):
        rng = random.Random(f"{case} {seed}")
        paths = []
        for file in EXCERPTS[case]:
            paths.append(tmp_path / file.rpartition("/")[2])
            shutil.copy(shared_data / file, paths[-1])
        odd = rng.choice(paths)
        odd.write_bytes(damaged(odd, rng))
        images = shared_data / "images" / WITH_IMAGES[case] if case in WITH_IMAGES else None
        report = Report(log_level=0)
        source = SOURCES[name](paths, images if seed % 2 else None)
        records = list(source.records(report))

        assert len(records) == report.num_kept
        assert records or report.problems, (case, seed)
        for problem in report.problems:
            assert problem.reason and problem.message and str(tmp_path) in problem.where
        for record in records:
            line = record.model_dump_json()
            assert Record.model_validate_json(line).model_dump_json() == line
        for stage in make_stages(["pool", "finalise"], PipelineSettings()):
            outcomes = stage.judge(records)
            settled = stage.settle(outcomes) if stage.settle else {}
            outcomes = [settled.get(number, outcome) for number, outcome in enumerate(outcomes)]
            assert len(outcomes) == len(records) and all(o.verdict for o in outcomes)
            records = [o.record for o in outcomes if o.verdict != "dropped"]
        write_records(tmp_path / "built.jsonl", records)
        assert len(read_records(tmp_path / "built.jsonl")) == len(records)
