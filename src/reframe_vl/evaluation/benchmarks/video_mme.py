"""Video-MME: short, medium and long videos of many domains; multiple choice, without subtitles.

Rule: accuracy over all questions, by duration and by task.

Sources: the form of the answers' file in github.com/MME-Benchmarks/Video-MME,
evaluation/output_test_template.json at 06c2315b892f88578f81d73205d07cf576f292b9; fields and
averages as github.com/EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/videomme/utils.py at
75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3.
"""

from __future__ import annotations

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.letters import without_label


class _Row(RowFields):
    question_id: Text
    videoID: str
    duration: str
    domain: str
    task_type: str
    question: str
    options: tuple[str, ...]
    answer: str


class VideoMME(Benchmark):
    """Parquet of questions, and videos named by ``videoID``."""

    by = ("duration", "task")
    hub = Hub("lmms-lab/Video-MME", "test")
    files = ("*.parquet",)

    def item(self, row: Row) -> Item:
        """One item a row."""
        fields = _Row.model_validate(row.raw)
        options = [without_label(option, i) for i, option in enumerate(fields.options)]
        return self.draft(
            fields.question_id,
            self.media.video(fields.videoID),
            fields.question,
            right_option(fields.answer, options),
            options,
            groups={
                "duration": fields.duration,
                "domain": fields.domain,
                "task": fields.task_type,
            },
        )
