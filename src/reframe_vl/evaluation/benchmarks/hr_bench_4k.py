"""HR-Bench 4K: one (FSP) or several (FCP) things in images of 4K; options in every cyclic order.

Rule: each question stands there once a cyclic order of its options. Accuracy is taken in each cycle
and averaged over the cycles: over all, and of the categories ``single`` (FSP) and ``cross`` (FCP).

Sources: github.com/open-compass/VLMEvalKit, vlmeval/dataset/utils/hrbench.py at
e8e78f05f3080fe28154f2130321f17951c3be94 (the authors' fork lies in github.com/DreamMr/HR-Bench,
b17b1998fa2c1b71a737c126155826a94149ed13). There a language model matches answers that state no
letter; here such an answer is wrong.
"""

from __future__ import annotations

import string
from typing import Any, ClassVar

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.scores import Draws, Scored


class _Row(RowFields):
    index: Text
    image: Any
    question: str
    answer: str
    category: str
    cycle_category: Text


class HRBench4K(Benchmark):
    """``hr_bench_4k.tsv``, or Parquet, with images in base64."""

    hub = Hub("DreamMr/HR-Bench", "hrbench_4k", ("hrbench_version_split",))
    files: ClassVar[tuple[str, ...]] = ("hr_bench_4k*.tsv", "hr_bench_4k*.parquet")

    def item(self, row: Row) -> Item:
        """One item a row; the options stand in columns ``A`` to ``D``."""
        fields = _Row.model_validate(row.raw)
        options = options_of_columns(row.raw)
        return self.draft(
            fields.index,
            self.media.image(fields.image),
            fields.question,
            right_option(fields.answer, options),
            options,
            groups={"category": fields.category, "cycle": fields.cycle_category},
        )

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Averages over cycles."""
        found = {"accuracy": scored.macro("score", "cycle")}
        for category in scored.labels("category"):
            found[f"accuracy/category={category}"] = scored.macro(
                "score", "cycle", category=category
            )
        return found


def options_of_columns(raw: dict[str, Any]) -> list[str]:
    """The options of a row that has one in each of the columns ``A``, ``B``, …."""
    found = []
    for letter in string.ascii_uppercase:
        if letter not in raw:
            break
        found.append(str(raw[letter]))
    return found
