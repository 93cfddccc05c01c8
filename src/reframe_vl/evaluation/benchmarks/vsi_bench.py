"""VSI-Bench: spatial questions about indoor videos; multiple choice, and numbers by MRA.

Rule: accuracy on multiple choice; on numbers the mean relative accuracy, the share of thresholds θ
= 0.5, 0.55, …, 0.95 for which the relative error is at most 1 − θ. Overall: the mean over the eight
tasks, the three difficulties of relative direction averaged to one before.

Sources: github.com/vision-x-nyu/thinking-in-space, lmms_eval/tasks/vsibench/utils.py at
51e089c3ae69b9435e9489058610f5b3964c56a8, and the same file of github.com/EvolvingLMMs-Lab/lmms-eval
at 75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3. There the first word, or the first number, of the text
counts; here the one number that the answer states.
"""

from __future__ import annotations

from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge, Response, right_option
from reframe_vl.evaluation.releases.files import Hub
from reframe_vl.evaluation.rules.letters import without_label
from reframe_vl.evaluation.rules.numbers import mean_relative_accuracy, stated_number
from reframe_vl.evaluation.rules.scores import Draws, Scored, mean_of
from reframe_vl.types import Answer

_NUMBERS = frozenset(
    ("object_abs_distance", "object_counting", "object_size_estimation", "room_size_estimation")
)
_DIRECTION = "object_rel_direction"


class _Row(RowFields):
    id: Text
    dataset: str
    scene_name: str
    question_type: str
    question: str
    ground_truth: Text
    options: tuple[str, ...] | None = None


class VSIBench(Benchmark):
    """The Parquet or JSON lines of the test split, and videos as ``DATASET/SCENE.mp4``."""

    is_binary = False
    hub = Hub("nyu-visionx/VSI-Bench", "test")
    files = ("test.jsonl", "test-*.parquet", "test*.parquet")

    def item(self, row: Row) -> Item:
        """One item a row, with options or a number to find."""
        fields = _Row.model_validate(row.raw)
        options: list[str] = []
        if fields.question_type in _NUMBERS:
            if (stated_number(fields.ground_truth) or 0) <= 0:
                raise Refused("no_number", f"{fields.ground_truth!r} is no number above 0.")
            answer = Answer("number", fields.ground_truth)
        else:
            options = [without_label(o, i) for i, o in enumerate(fields.options or ())]
            answer = right_option(fields.ground_truth, options)
        return self.draft(
            fields.id,
            self.media.video(f"{fields.dataset}/{fields.scene_name}.mp4"),
            fields.question,
            answer,
            options,
            groups={"task": fields.question_type, "dataset": fields.dataset},
        )

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """1 or 0 on multiple choice, else the mean relative accuracy."""
        if item.sample.answer.kind != "number":
            return super().score(item, response, judge)
        given, truth = stated_number(response.text), stated_number(item.sample.answer.value)
        if given is None or truth is None:
            return {"score": 0.0}
        return {"score": mean_relative_accuracy(given, truth)}

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Each task's mean, and the mean of the eight."""
        tasks = {task: scored.mean("score", task=task) for task in scored.labels("task")}
        directions = [name for name in tasks if name.startswith(_DIRECTION)]
        merged = {name: value for name, value in tasks.items() if name not in directions}
        if directions:
            merged[_DIRECTION] = mean_of([tasks[name] for name in directions])
        named = {f"accuracy/task={name}": value for name, value in (tasks | merged).items()}
        return {"accuracy": mean_of(list(merged.values())), **named}
