"""CG-Bench: multiple choice about long videos, with the windows that hold the clue.

Rule: long-video accuracy; mIoU of the given windows with the clue's; rec@IoU, the share of
questions with an IoU of at least τ, averaged over τ = 0.1, …, 0.5; acc@IoU, the same where the
answer is right too.

Sources: github.com/CG-Bench/CG-Bench, run/stat_with_key.py and run/utils.py at
f826608752443a13b21f214c2d9c4156c526f030. There the model writes windows in a run of their own; here
they are the time of the frames that the policy's calls returned as it answered (ours). The authors'
clue-based accuracy and open-ended runs are not made.
"""

from __future__ import annotations

from collections.abc import Iterator

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.data.report import Problem
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, Response, right_option
from reframe_vl.evaluation.releases.files import KEY, Hub
from reframe_vl.evaluation.rules.scores import Draws, Scored, mean_of
from reframe_vl.evaluation.rules.spans import Span, intervals_iou

_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)


class _Row(RowFields):
    qid: Text
    video_uid: str
    question: str
    choices: tuple[Text, ...]
    right_answer: str
    clue_intervals: tuple[Span, ...]
    domain: str
    sub_category: str


class CGBench(Benchmark):
    """``cgbench.json`` (or ``cgbench_mini.json``), and videos named by ``video_uid``."""

    terms = (
        "score",
        "iou",
        *(f"rec@{t}" for t in _THRESHOLDS),
        *(f"acc@{t}" for t in _THRESHOLDS),
    )
    by = ("domain", "category")
    hub = Hub("CG-Bench/CG-Bench", "test")
    files = ("cgbench.json", "cgbench_mini.json", "*.parquet")

    def rows(self) -> Iterator[Row | Problem]:
        """The questions; facts of videos that lie beside them are passed over."""
        return (row for row in super().rows() if isinstance(row, Problem) or KEY not in row.raw)

    def item(self, row: Row) -> Item:
        """One item a question."""
        fields = _Row.model_validate(row.raw)
        return self.draft(
            fields.qid,
            self.media.video(fields.video_uid),
            fields.question,
            right_option(fields.right_answer, fields.choices),
            fields.choices,
            groups={"domain": fields.domain, "category": fields.sub_category},
            windows=fields.clue_intervals,
            facts={"windows": fields.clue_intervals},
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """The answer's term, ``iou``, and what share of the thresholds is reached."""
        terms = super().score(item, response, judge)
        iou = intervals_iou(response.spans, item.facts["windows"])
        reached = {f"rec@{t}": float(iou >= t) for t in _THRESHOLDS}
        both = {f"acc@{t}": terms["score"] * reached[f"rec@{t}"] for t in _THRESHOLDS}
        return terms | {"iou": iou} | reached | both

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Accuracy and the measures of grounding."""
        return super().measures(scored) | {
            "mean_iou": scored.mean("iou"),
            "rec@iou": mean_of([scored.mean(f"rec@{t}") for t in _THRESHOLDS]),
            "acc@iou": mean_of([scored.mean(f"acc@{t}") for t in _THRESHOLDS]),
        }
