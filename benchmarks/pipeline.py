"""The data pipeline on records with planted faults: what each stage catches, and what is lost.

Records of the mini image and video worlds go through all five stages. The verifier is a rule that
reads the digits off the pixels. Of each fault are counted those that the stage meant for it catches
(recall), and among all that it catches for that reason the share that has the fault (precision).
What no stage caught has slipped; what slipped not and is missing from the recall was caught for
another reason (a thousand such small pictures have look-alikes among them). A sound record that
does not come out is lost.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import numpy as np
import planted
from planted import MEANT, SETTINGS, Planted

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.data.pipeline import (
    STAGES,
    Disposition,
    dispositions,
    finished_records,
    make_stages,
    run_pipeline,
)
from reframe_vl.data.records import Record
from reframe_vl.data.stages.held_out import held_out_of
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.cache import AnswerCache
from reframe_vl.mini.verifier import RuleVerifier
from reframe_vl.rewards.grounding import pairwise_iou

UNTOUCHED, WRONGLY_MENDED = ("", ""), ("diagnose", "wrongly mended")
MISSED = (UNTOUCHED, WRONGLY_MENDED)


def measure(made: Planted, work: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs the pipeline; returns a row a fault, and the summary."""
    cache = AnswerCache(work / "answers.sqlite")
    asker = Asker(RuleVerifier(), cache)
    held_out = held_out_of(made.held_out, made.open)
    stages = make_stages(STAGES, SETTINGS, made.open, [asker], held_out)
    start = time.perf_counter()
    run_pipeline(stages, made.records, work)
    seconds = time.perf_counter() - start
    cache.close()
    found = {d.id: d for d in dispositions(work, STAGES)}
    finished = {record.id: record for record in finished_records(work, STAGES[-1])}
    rows = _rows(made, found, finished)
    lost = [d for d in found.values() if d.id not in made.faults and d.verdict == "dropped"]
    sound = len(made.records) - len(made.faults)
    for disposition in lost:
        print(f"lost: {disposition}", file=sys.stderr)
    summary = {
        "records": len(made.records),
        "sound": sound,
        "sound_lost": len(lost),
        "sound_lost_share": len(lost) / sound,
        "slipped": sum(row["slipped"] for row in rows),
        "least_recall": min(row["recall"] for row in rows),
        "least_precision": min(row["precision"] for row in rows),
        "records_per_s": len(made.records) / seconds,
    }
    return rows, summary


def _rows(
    made: Planted, found: dict[str, Disposition], finished: dict[str, Record]
) -> list[dict[str, Any]]:
    caught = {id_: _caught(made, d, finished) for id_, d in found.items()}
    planted_of = Counter(made.faults.values())
    right = Counter(fault for id_, fault in made.faults.items() if caught[id_] == MEANT[fault])
    slipped = Counter(fault for id_, fault in made.faults.items() if caught[id_] in MISSED)
    all_caught = Counter(caught.values())
    rows = []
    for fault, (stage, reason) in MEANT.items():
        alike = sum(right[other] for other in MEANT if MEANT[other] == (stage, reason))
        rows.append(
            {
                "fault": fault,
                "stage": stage,
                "reason": reason,
                "planted": planted_of[fault],
                "caught": right[fault],
                "slipped": slipped[fault],
                "recall": right[fault] / planted_of[fault],
                "precision": alike / max(all_caught[stage, reason], 1),
            }
        )
    return rows


def _caught(
    made: Planted, disposition: Disposition, finished: dict[str, Record]
) -> tuple[str, str]:
    """The stage and reason that decided about a record; a mended box has to be the right one."""
    if disposition.verdict == "dropped":
        return disposition.stage, disposition.reason
    record = finished[disposition.id]
    mended = [e for e in record.audit if e.verdict == "changed" and e.stage == "diagnose"]
    if not mended:
        return UNTOUCHED
    truth = made.truth.get(record.id)
    if truth is None or not record.boxes:
        return WRONGLY_MENDED
    overlap = pairwise_iou(np.array([record.boxes[0].xyxy]), np.array([truth]))[0, 0]
    return ("diagnose", str(mended[0].reason)) if overlap > 0.9 else WRONGLY_MENDED


def main() -> None:
    """Measures and reports."""
    args = common.arguments(__doc__ or "").parse_args()
    num_sound, num_each = (100, 10) if args.quick else (1000, 100)
    with tempfile.TemporaryDirectory() as folder:
        rows, summary = measure(planted.plant(num_sound, num_each), Path(folder))
    content = common.report(rows, summary)
    common.show(rows, "faults")
    common.show([summary], "summary")
    file = args.json or (None if args.quick else common.RESULTS / "pipeline.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("pipeline", "The data pipeline", __doc__ or "", content)


if __name__ == "__main__":
    main()
