"""NExT-GQA: multiple choice about short videos, with windows that hold the answer.

Rule: of a question the best IoU and the best IoP (overlap over the given span) of one span with any
of its windows. Acc@GQA is the share of questions that are answered right with an IoP of at least
0.5. Beside it Acc@QA, mIoP, IoP@0.3, IoP@0.5, mIoU, IoU@0.3 and IoU@0.5.

Sources: github.com/doc-doc/NExT-GQA, code/TempGQA/eval_ground.py at
63772e0256ad9e34b83d6a108f1ba2041b924607. There a model gives a span; here it reaches from the first
to the last of the frames that the policy's calls returned, and without a call there is none and all
is 0 (ours; there such questions are not counted).
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text
from reframe_vl.data.report import Problem
from reframe_vl.data.sources.nextgqa import NextGqa
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, Response, right_option
from reframe_vl.evaluation.releases.files import files_of
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.evaluation.rules.spans import Span, best_iou_and_iop
from reframe_vl.rewards.choice import letter_of


class _Question(RowFields):
    video_id: str
    qid: Text
    type: str
    question: str
    answer: str
    a0: str
    a1: str
    a2: str
    a3: str
    a4: str


class _Windows(BaseModel):
    location: tuple[Span, ...]


class NExTGQA(Benchmark):
    """``test.csv`` and ``gsub_test.json``, and videos named by ``video_id``."""

    primary = "acc@gqa"
    terms = ("score", "iou", "iop", "acc@gqa", "iop@0.3", "iop@0.5", "iou@0.3", "iou@0.5")
    by = ("type",)
    files = ("test.csv",)

    def rows(self) -> Iterator[Row | Problem]:
        """The table's questions, each with its windows."""
        if self.path is None:
            raise ValueError("nextgqa can only be read from files: set benchmark_path.")
        tables = files_of(self.path, self.files)
        windows = files_of(tables[0].parent, ("gsub_test.json", "gsub_*.json"))
        return NextGqa([*tables, *windows]).rows()

    def item(self, row: Row) -> Item:
        """One item a question that has windows."""
        fields = _Question.model_validate(row.raw["question"])
        if row.raw["windows"] is None:
            raise Refused("no_windows", "the question has no windows, so the rule leaves it out.")
        windows = _Windows.model_validate(row.raw["windows"]).location
        options = (fields.a0, fields.a1, fields.a2, fields.a3, fields.a4)
        if fields.answer not in options:
            raise Refused("answer_not_among_options", "the answer is none of a0 to a4.")
        return self.draft(
            f"{fields.video_id}/{fields.qid}",
            self.media.video(fields.video_id),
            fields.question,
            right_option(letter_of(options.index(fields.answer)), options),
            options,
            groups={"type": fields.type},
            windows=windows,
            facts={"windows": windows},
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """The answer's term and those of grounding."""
        terms = super().score(item, response, judge)
        spans = response.spans
        given = (spans[0][0], spans[-1][1]) if spans else None
        iou, iop = best_iou_and_iop(given, item.facts["windows"])
        at = {f"iop@{t}": float(iop >= t) for t in (0.3, 0.5)}
        at |= {f"iou@{t}": float(iou >= t) for t in (0.3, 0.5)}
        grounded = terms["score"] * at["iop@0.5"]
        return terms | {"iou": iou, "iop": iop, "acc@gqa": grounded} | at

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Accuracy and the measures of grounding."""
        names = ("acc@gqa", "iop@0.3", "iop@0.5", "iou@0.3", "iou@0.5")
        return super().measures(scored) | {
            **{name: scored.mean(name) for name in names},
            "mean_iop": scored.mean("iop"),
            "mean_iou": scored.mean("iou"),
        }
