"""V*: attributes and relative positions of small things in large images; multiple choice.

Rule: accuracy, overall and by category.

Sources: github.com/penghao-wu/vstar, vstar_bench_eval.py at
4ede6647959cfb59eeabd09286adf6a5f9478da0 (accuracy by category and over all items); the fields of
the rows as github.com/EvolvingLMMs-Lab/ lmms-eval, lmms_eval/tasks/vstar_bench/utils.py at
75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3 reads them. The authors' code compares likelihoods of the
options; here the policy answers with one, as in lmms-eval.
"""

from __future__ import annotations

from typing import Any

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.letters import IN_PARENTHESES, split_options


class _Row(RowFields):
    question_id: Text
    image: Any
    text: str
    label: str
    category: str


class VStar(Benchmark):
    """``test_questions.jsonl`` beside its folders of images, or Parquet with images inside."""

    by = ("category",)
    hub = Hub("lmms-lab-encoder/vstar-bench", "test")
    files = ("test_questions.jsonl", "*.parquet")

    def item(self, row: Row) -> Item:
        """One item a row; the options stand in the question's text."""
        fields = _Row.model_validate(row.raw)
        question, options = split_options(fields.text, IN_PARENTHESES)
        return self.draft(
            f"{fields.category}/{fields.question_id}",
            self.media.image(fields.image),
            question,
            right_option(fields.label, options),
            options,
            groups={"category": fields.category},
        )
