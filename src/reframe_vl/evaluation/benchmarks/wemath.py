"""We-Math: problems of two or three steps, and each of their steps as a problem of its own.

Rule: accuracy on single steps (S1), two-step (S2) and three-step problems (S3). Of each problem one
of four holds, by its steps and by itself: insufficient knowledge (a step and the whole wrong),
inadequate generalisation (all steps right, the whole wrong), complete mastery and rote memorisation
(the whole right). Strict: mastery needs all steps right, else it is rote. Loose: one right step is
enough. Score: 1 − 0.5·IG − RM − IK as shares of the problems; the rate of rote memorisation is RM /
(RM + CM).

Sources: github.com/We-Math/We-Math, evaluation/four_dimensional_metrics.py, evaluation/accuracy.py
and data/testmini.json at a57a0e83fc40d6ce1448926fe6495e57132e7b80. There the letter is the first
behind the last word "Answer"; here the one that is stated. Problems of which an item could not be
scored are left out of the four.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from reframe_vl.data.formats.rows import Refused, Row, RowFields
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, right_option
from reframe_vl.evaluation.rules.letters import AFTER_SEMICOLONS, split_options
from reframe_vl.evaluation.rules.scores import Draws, Scored

_STEPS = {"2steps": ("1", "2", "multi"), "3steps": ("1", "2", "3", "multi")}


class _Row(RowFields):
    ID: str
    key: str
    question: str
    option: str
    answer: str
    image_path: str


class WeMath(Benchmark):
    """``testmini.json`` and its images."""

    primary = "score_strict"
    files = ("testmini.json",)

    def item(self, row: Row) -> Item:
        """One item a step or whole; those of a problem are drawn together."""
        fields = _Row.model_validate(row.raw)
        kind, _, step = fields.key.partition("_")
        if step not in _STEPS.get(kind, ()) or fields.ID.partition("_")[0] != kind:
            raise Refused(
                "bad_key", f"the key {fields.key!r} is no step of the problem {fields.ID!r}."
            )
        _, options = split_options(fields.option, AFTER_SEMICOLONS)
        level = f"S{kind[0]}" if step == "multi" else "S1"
        return self.draft(
            f"{fields.ID}/{step}",
            self.media.image(fields.image_path),
            fields.question,
            right_option(fields.answer, options),
            options,
            groups={"problem": fields.ID, "step": step, "level": level},
            cluster=fields.ID,
        )

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Accuracy by level, and the four dimensions, strict and loose."""
        found = {"accuracy": scored.mean("score")}
        for level in scored.labels("level"):
            found[f"accuracy/level={level}"] = scored.mean("score", level=level)
        whole_P, all_P, any_P, weights_BP = _problems(scored)
        total_B = weights_BP.sum(1)
        ig_B = weights_BP @ (all_P & ~whole_P)
        ik_B = weights_BP @ (~all_P & ~whole_P)
        with np.errstate(divide="ignore", invalid="ignore"):
            found["inadequate_generalisation"] = ig_B / total_B
            found["insufficient_knowledge"] = ik_B / total_B
            for name, steps_P in (("strict", all_P), ("loose", any_P)):
                mastery_B = weights_BP @ (steps_P & whole_P)
                rote_B = weights_BP @ (~steps_P & whole_P)
                found[f"complete_mastery_{name}"] = mastery_B / total_B
                found[f"rote_memorisation_{name}"] = rote_B / (mastery_B + rote_B)
                found[f"score_{name}"] = (total_B - 0.5 * ig_B - rote_B - ik_B) / total_B
        return found


def _problems(
    scored: Scored,
) -> tuple[
    Bool[np.ndarray, "P"], Bool[np.ndarray, "P"], Bool[np.ndarray, "P"], Float[np.ndarray, "B P"]
]:
    """Of each complete problem: is the whole right, are all steps, is any step; and its weights."""
    members: dict[str, dict[str, int]] = {}
    for index, (problem, step) in enumerate(
        zip(scored.groups["problem"], scored.groups["step"], strict=True)
    ):
        members.setdefault(problem[0], {})[step[0]] = index
    right_N = scored.terms["score"] == 1
    complete = [m for p, m in members.items() if m.keys() == {*_STEPS[p.partition("_")[0]]}]
    steps = [[right_N[i] for s, i in m.items() if s != "multi"] for m in complete]
    firsts = [m["1"] for m in complete]
    return (
        np.array([right_N[m["multi"]] for m in complete], bool),
        np.array([all(s) for s in steps], bool),
        np.array([any(s) for s in steps], bool),
        scored.weights_BN[:, firsts],
    )
