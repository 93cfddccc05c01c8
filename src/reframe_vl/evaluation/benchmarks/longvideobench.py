"""LongVideoBench: referring reasoning in videos of up to an hour; multiple choice, no subtitles.

Rule: accuracy over all questions, by duration group and by question category.

Sources: github.com/longvideobench/LongVideoBench, longvideobench/longvideobench_dataset.py at
fc3c553250cfee6853a722f9b181f1b69f478426 (fields), and github.com/EvolvingLMMs-Lab/lmms-eval,
lmms_eval/tasks/longvideobench/utils.py at 75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3 (averages).
There an answer without a letter is given a random one; here it is wrong.
"""

from __future__ import annotations

from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text, Whole
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.rewards.choice import letter_of


class _Row(RowFields):
    id: Text
    video_path: str
    question: str
    correct_choice: Whole
    duration_group: Text
    question_category: str
    candidates: tuple[Text, ...] | None = None


class LongVideoBench(Benchmark):
    """``lvb_val.json``, or the Parquet of the validation split, and ``videos/``."""

    by = ("duration", "category")
    hub = Hub("longvideobench/LongVideoBench", "validation")
    files = ("lvb_val.json", "validation*.parquet")

    def item(self, row: Row) -> Item:
        """One item a row; Parquet has the options in columns, ``N/A`` where there is none."""
        fields = _Row.model_validate(row.raw)
        options = fields.candidates or tuple(
            str(option) for i in range(5) if (option := row.raw.get(f"option{i}", "N/A")) != "N/A"
        )
        if fields.correct_choice < 0:
            raise Refused("no_answer", "the test split has no answers. Take the validation split.")
        return self.draft(
            fields.id,
            self.media.video(fields.video_path),
            fields.question,
            right_option(letter_of(fields.correct_choice), options),
            options,
            groups={"duration": fields.duration_group, "category": fields.question_category},
        )
