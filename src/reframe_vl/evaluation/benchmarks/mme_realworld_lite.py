"""MME-RealWorld-Lite: perception and reasoning in large real-world images; five options.

Rule: accuracy over all items, by task (perception, reasoning) and by sub-task.

Sources: github.com/MME-Benchmarks/MME-RealWorld, evaluation/eval_your_results.py at
bee58edb82c883843ae93be61c2ae3b452c781d1; the Parquet fields as
github.com/EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mme_realworld/utils.py at
75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3 reads them. There the first of the letters A to E anywhere
in the text counts; here the one that is stated.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.letters import without_label


class _Row(RowFields):
    name: Text = Field(validation_alias=AliasChoices("Question_id", "index"))
    image: Any = Field(validation_alias=AliasChoices("Image", "bytes", "image"))
    question: str = Field(validation_alias=AliasChoices("Text", "question"))
    options: tuple[str, ...] = Field(
        validation_alias=AliasChoices("Answer choices", "multi-choice options")
    )
    answer: str = Field(validation_alias=AliasChoices("Ground truth", "answer"))
    category: str = Field(validation_alias=AliasChoices("Category", "category"))
    task: str | None = Field(default=None, validation_alias="Task")
    subtask: str | None = Field(default=None, validation_alias="Subtask")


class MMERealWorldLite(Benchmark):
    """``MME-RealWorld-Lite.json`` with its images, or Parquet with images inside."""

    by = ("task", "subtask")
    hub = Hub("yifanzhang114/MME-RealWorld-lite-lmms-eval", "train")
    files = ("MME-RealWorld-Lite.json", "*.parquet")

    def item(self, row: Row) -> Item:
        """One item a row. Rows for lmms-eval hold task and sub-task in their category."""
        fields = _Row.model_validate(row.raw)
        in_category = "perception" if "perception" in fields.category.lower() else "reasoning"
        options = [without_label(option, i) for i, option in enumerate(fields.options)]
        return self.draft(
            fields.name,
            self.media.image(fields.image),
            fields.question,
            right_option(fields.answer, options),
            options,
            groups={
                "task": (fields.task or in_category).lower(),
                "subtask": fields.subtask or fields.category.split("/")[-1],
            },
        )
