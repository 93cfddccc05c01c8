"""VisualProbe: small things in large images, three difficulties; open answers.

Rule: a judge compares the answer with the reference; accuracy of each difficulty. The mean over the
difficulties is ours: the authors give none.

Sources: github.com/Mini-o3/Mini-o3 at 8654dbf42d2ea98b9d81b6cc7179026dd0598fdf:
docs/mini_o3_demo.md (fields), verl/utils/reward_score/general_qa_tool.py (a language model says 0
or 1 of the last answer block) and README.md (avg@k). The judge's words are ours. Without a judge
only an answer that is the reference word for word is right.
"""

from __future__ import annotations

from reframe_vl.data.formats.rows import Refused, Row, RowFields, Text
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.types import Answer

_DIFFICULTIES = ("easy", "medium", "hard")


class _Row(RowFields):
    images: tuple[str, ...]
    problem: str
    solution: Text
    data_source: str = ""


class VisualProbe(Benchmark):
    """``VisualProbe_Easy``, ``…_Medium`` and ``…_Hard``, each with ``val.json`` and ``data/``."""

    by = ("difficulty",)
    files = ("val.json",)

    def item(self, row: Row) -> Item:
        """One item a row of the three difficulties."""
        fields = _Row.model_validate(row.raw)
        named = f"{fields.data_source} {row.path.parent.name}".lower()
        difficulty = next((d for d in _DIFFICULTIES if d in named), None)
        if difficulty is None:
            raise Refused(
                "no_difficulty",
                "neither data_source nor the folder's name says easy, medium or hard.",
            )
        return self.draft(
            f"{difficulty}/{row.place.split()[-1]}",
            self.media.side_by_side(fields.images),
            fields.problem.replace("<image>", ""),
            Answer("open", fields.solution.strip()),
            groups={"difficulty": difficulty},
        )

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Accuracy of each difficulty, and the mean of these."""
        return super().measures(scored) | {"accuracy": scored.macro("score", "difficulty")}
