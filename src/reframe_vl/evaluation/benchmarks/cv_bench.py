"""CV-Bench: counting and relations in 2D, depth order and distance in 3D; multiple choice.

Rule: half of the mean of the accuracies on the two sources of 2D (ADE20K and COCO), half of the
accuracy on 3D (Omni3D).

Sources: github.com/EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/cv_bench/utils.py at
75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3, and github.com/open-compass/VLMEvalKit,
vlmeval/dataset/image_mcq.py (CVBench) at e8e78f05f3080fe28154f2130321f17951c3be94. The authors'
repository (github.com/cambrian-mllm/cambrian at 539ffc3254bba004e5d012b65c0ad6cb308897c5) has no
code for it.
"""

from __future__ import annotations

from typing import Any

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.scores import Draws, Scored, mean_of


class _Row(RowFields):
    idx: Text
    type: str
    task: str
    image: Any
    question: str
    choices: tuple[Text, ...]
    answer: str
    source: str


class CVBench(Benchmark):
    """``test_2d.parquet`` and ``test_3d.parquet``, with images inside."""

    by = ("source", "task")
    hub = Hub("nyu-visionx/CV-Bench", "test", ("2D", "3D"))
    files = ("test*.parquet",)

    def item(self, row: Row) -> Item:
        """One item a row."""
        fields = _Row.model_validate(row.raw)
        return self.draft(
            f"{fields.type}/{fields.idx}",
            self.media.image(fields.image),
            fields.question,
            right_option(fields.answer, fields.choices),
            fields.choices,
            groups={"type": fields.type, "source": fields.source, "task": fields.task},
        )

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """The two halves and their mean."""
        halves = {
            f"accuracy/type={label}": scored.macro("score", "source", type=label)
            for label in scored.labels("type")
        }
        return super().measures(scored) | halves | {"accuracy": mean_of(list(halves.values()))}
