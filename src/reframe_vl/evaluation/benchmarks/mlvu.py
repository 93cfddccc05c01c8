"""MLVU: several tasks on long videos; the multiple-choice tasks.

Rule: M-Avg, the mean over the tasks of the accuracy on each. The two generation tasks (sub-scene
captioning and summary), which a language model rates on scales of its own, are left out.

Sources: github.com/JUNJIE99/MLVU at fd060c10a43ea48a35100a22688a927b8e531199: data/*.json (fields),
evaluation/multiple_choice_evaluation/choice_bench.py (accuracy by task); M-Avg as in
github.com/EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mlvu/utils.py at
75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3.
"""

from __future__ import annotations

from reframe_vl.data.formats.choices import number_of_text
from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.rewards.choice import letter_of

_GENERATION = frozenset(("sub_scene", "summary"))


class _Row(RowFields):
    video: str
    question: str
    question_type: str
    answer: Text
    candidates: tuple[Text, ...] = ()
    question_id: Text = ""


class MLVU(Benchmark):
    """The folder ``json/`` of the release, and ``video/`` with the videos of each task."""

    by = ("task",)
    files = ("[0-9]_*.json", "*.json")

    def item(self, row: Row) -> Item:
        """One item a row with candidates."""
        fields = _Row.model_validate(row.raw)
        if fields.question_type in _GENERATION:
            raise Refused("generation_task", "generation tasks are not evaluated. Leave them out.")
        options = tuple(option.strip() for option in fields.candidates)
        right = number_of_text(fields.answer, options)
        return self.draft(
            fields.question_id or f"{fields.question_type}/{row.place.split()[-1]}",
            self.media.video(fields.video),
            fields.question,
            right_option(letter_of(right), options),
            options,
            groups={"task": fields.question_type},
        )

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Accuracy of each task, and M-Avg."""
        return super().measures(scored) | {"accuracy": scored.macro("score", "task")}
