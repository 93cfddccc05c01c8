"""TreeBench: perception and reasoning with traceable evidence; multiple choice with target boxes.

Rule: accuracy, overall and by category; and the mean over items of the mean over target boxes of
the best IoU with any box that the policy gave.

Sources: github.com/Haochen-Wang409/TreeVGR, inference_treebench.py at
4823ad8860f13b5eac360bba592f7c3442c6e04c, and github.com/open-compass/VLMEvalKit,
vlmeval/dataset/image_mcq.py (TreeBench) at e8e78f05f3080fe28154f2130321f17951c3be94. There boxes
are read from the reasoning's text; here they are the regions that the policy's calls returned
(ours).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from reframe_vl.data.formats.rows import Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, Response, right_option
from reframe_vl.evaluation.benchmarks.hr_bench_4k import options_of_columns
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.letters import ON_LINES, split_options
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.rewards.grounding import pairwise_iou
from reframe_vl.types import Box


class _Row(RowFields):
    index: Text
    image: Any
    question: str
    answer: str
    category: str
    target_instances: tuple[Box, ...]
    options: str = Field(default="", alias="multi-choice options")

    @field_validator("target_instances", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        # Written by Python, tuples included.
        lists = str.maketrans("()", "[]")
        return json.loads(value.translate(lists)) if isinstance(value, str) else value


class TreeBench(Benchmark):
    """``TreeBench.tsv``, with images in base64."""

    terms = ("score", "iou")
    by = ("category",)
    hub = Hub("HaochenWang/TreeBench", "train", file="TreeBench.tsv")
    files = ("TreeBench.tsv",)

    def item(self, row: Row) -> Item:
        """One item a row; questions of the category OCR hold their options themselves."""
        fields = _Row.model_validate(row.raw)
        question, options = fields.question, tuple(options_of_columns(row.raw))
        if not options:
            text = f"{question}\n{fields.options}"
            question, options = split_options(text, ON_LINES)
        return self.draft(
            fields.index,
            self.media.image(fields.image),
            question.removesuffix("Options:"),
            right_option(fields.answer, options),
            options,
            groups={"category": fields.category},
            boxes=fields.target_instances,
            facts={"boxes": fields.target_instances},
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """The answer's term and ``iou``."""
        targets = np.array(item.facts["boxes"], np.float64).reshape(-1, 4)
        given = np.array(response.boxes, np.float64).reshape(-1, 4)
        iou = 0.0
        if len(targets) and len(given):
            iou = float(pairwise_iou(given, targets).max(axis=0).mean())
        return super().score(item, response, judge) | {"iou": iou}

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Accuracy and mean IoU."""
        return super().measures(scored) | {"mean_iou": scored.mean("iou")}
