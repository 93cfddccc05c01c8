"""From answers to results.json: each benchmark's measures with intervals, and their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.table import Table

from reframe_vl.evaluation.answers import Answered, AnswerFile
from reframe_vl.evaluation.benchmark_play import SAMPLED
from reframe_vl.evaluation.benchmark_scores import Terms, draws_of, score_answers
from reframe_vl.evaluation.benchmarks.base import Benchmark, Item, Judge
from reframe_vl.evaluation.intervals import hierarchical_interval
from reframe_vl.evaluation.metrics import gain_and_harm
from reframe_vl.evaluation.outcomes import Arm
from reframe_vl.evaluation.pass_at_k import SampledAnswers, pass_curve
from reframe_vl.evaluation.rules.scores import Draws, interval_of, mean_of

Entry = dict[str, float] | None
"""``{"value", "low", "high"}``, or None where there is nothing to take it of."""


@dataclass
class Evaluated:
    """What one benchmark came to.

    Attributes:
        report: As it stands in results.json.
        scores: The terms of each item by condition.
        primary: The draws of the primary measure by condition.
    """

    report: dict[str, Any]
    scores: dict[str, dict[str, Terms]]
    primary: dict[str, Draws] = field(default_factory=dict)


def evaluated(
    benchmark: Benchmark,
    items: Sequence[Item],
    answers: AnswerFile,
    conditions: Sequence[str],
    samples: int = 0,
    judge: Judge | None = None,
) -> Evaluated:
    """Scores all answers to a benchmark.

    Args:
        samples: Answers that were sampled to each item, beside the conditions.
    """
    found = Evaluated({}, {})
    sections: dict[str, Any] = {}
    for name in conditions:
        given = answers.of(name)
        scores, left_out = score_answers(benchmark, items, given, judge)
        draws = draws_of(benchmark, items, scores)
        found.scores[name] = scores
        if benchmark.primary in draws:
            found.primary[name] = draws[benchmark.primary]
        sections[name] = {
            "items": len(scores),
            "left_out": dict(sorted(left_out.items())),
            "measures": {measure: _entry(values) for measure, values in draws.items()},
            **_behaviour(items, given, scores),
        }
    found.report = {
        "primary": benchmark.primary,
        "items": len(items),
        "open_items": sum(item.sample.answer.kind == "open" for item in items),
        "judge": judge.identity if judge is not None else None,
        "conditions": sections,
        **_contrasts(benchmark, items, found.scores),
        **_gain_and_harm(benchmark, items, answers, found.scores),
    }
    if samples:
        found.report["sampled"] = _sampled(benchmark, items, answers, samples, judge)
    return found


def contrast(
    benchmark: Benchmark,
    items: Sequence[Item],
    parts: Sequence[tuple[float, Mapping[str, Terms]]],
) -> dict[str, Draws]:
    """A weighted sum of each measure on the items that all parts hold: a paired difference."""
    shared = [i for i in items if all(i.sample.id in scores for _, scores in parts)]
    if not shared:
        return {}
    draws = [(weight, draws_of(benchmark, shared, scores)) for weight, scores in parts]
    names = [name for name in draws[0][1] if all(name in part for _, part in draws)]
    return {name: np.sum([weight * part[name] for weight, part in draws], axis=0) for name in names}


def mean_over_benchmarks(found: Mapping[str, Evaluated]) -> dict[str, Entry]:
    """The mean of the primary measures by condition, of conditions that all benchmarks have."""
    everywhere = [
        name
        for name in next(iter(found.values())).primary
        if all(name in one.primary for one in found.values())
    ]
    # Benchmarks do not share media: each has draws of its own, in another order.
    means = {}
    for name in everywhere:
        parts = []
        for number, one in enumerate(found.values()):
            order = np.random.default_rng(number).permutation(len(one.primary[name]) - 1) + 1
            parts.append(np.concatenate([one.primary[name][:1], one.primary[name][order]]))
        means[name] = _entry(mean_of(parts))
    return means


def table(report: Mapping[str, Any]) -> Table:
    """The primary measure of every benchmark in every condition, and the means."""
    found = Table(title="Primary measures, 95% intervals")
    for name in ("benchmark", "condition", "measure", "value"):
        found.add_column(name, no_wrap=name == "value")
    for name, one in report["benchmarks"].items():
        for condition, section in one["conditions"].items():
            entry = section["measures"].get(one["primary"])
            found.add_row(name, condition, one["primary"], shown(entry))
        found.add_section()
    if len(report["benchmarks"]) > 1:
        for condition, entry in report["mean"].items():
            found.add_row("mean", condition, "", shown(entry))
    return found


def shown(entry: Entry) -> str:
    """A value with its interval as people read it."""
    if entry is None:
        return "-"
    return f"{entry['value']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"


def _entry(draws: Draws) -> Entry:
    interval = interval_of(draws)
    return interval.to_dict() if interval is not None else None


def _behaviour(
    items: Sequence[Item], answers: Mapping[str, Answered], scores: Mapping[str, Terms]
) -> dict[str, Entry]:
    """What the policy did on the items that were scored."""
    scored = [item for item in items if item.sample.id in scores]
    lines = [answers[item.sample.id] for item in scored]
    columns = {
        "call_rate": [float(line.calls > 0) for line in lines],
        "calls_per_answer": [float(line.calls) for line in lines],
        "visual_tokens": [float(line.visual_tokens) for line in lines],
        "sampled_tokens": [float(line.sampled_tokens) for line in lines],
        "no_answer": [float(line.blocks == 0) for line in lines],
    }
    clusters = [item.cluster for item in scored]
    found: dict[str, Entry] = {
        name: hierarchical_interval(np.array(values), clusters).to_dict() if values else None
        for name, values in columns.items()
    }
    grounded = [
        (line.iou, c) for line, c in zip(lines, clusters, strict=True) if line.iou is not None
    ]
    found["grounding_iou"] = None
    if grounded:
        values, seen = zip(*grounded, strict=True)
        found["grounding_iou"] = hierarchical_interval(np.array(values), seen).to_dict()
    return found


def _contrasts(
    benchmark: Benchmark, items: Sequence[Item], scores: Mapping[str, Mapping[str, Terms]]
) -> dict[str, Entry]:
    """Tool gain and observation dependence of docs/method.md, 1.6, on the primary measure."""
    wanted = {
        "tool_gain": ((1.0, Arm.TOOLS), (-1.0, Arm.NO_TOOLS)),
        "tool_gain_matched": ((1.0, Arm.TOOLS), (-1.0, Arm.NO_TOOLS_MATCHED)),
        "observation_dependence": ((1.0, Arm.TRUE), (-0.5, Arm.RANDOM), (-0.5, Arm.BLANK)),
        "observation_dependence_vs_random": ((1.0, Arm.TRUE), (-1.0, Arm.RANDOM)),
        "observation_dependence_dropped": (
            (1.0, Arm.TRUE_DROPPED),
            (-0.5, Arm.RANDOM_DROPPED),
            (-0.5, Arm.BLANK_DROPPED),
        ),
    }
    found: dict[str, Entry] = {}
    # At each budget of visual tokens, whose conditions are named ARM@TOKENS.
    for budget in dict.fromkeys(name[len(name.partition("@")[0]) :] for name in scores):
        for name, parts in wanted.items():
            names = [(weight, f"{arm.value}{budget}") for weight, arm in parts]
            draws = {}
            if all(condition in scores for _, condition in names):
                draws = contrast(benchmark, items, [(w, scores[c]) for w, c in names])
            primary = draws.get(benchmark.primary)
            found[f"{name}{budget}"] = None if primary is None else _entry(primary)
    return found


def _gain_and_harm(
    benchmark: Benchmark,
    items: Sequence[Item],
    answers: AnswerFile,
    scores: Mapping[str, Mapping[str, Terms]],
) -> dict[str, Entry]:
    """P(right with tools, wrong without) and the reverse, split by whether a tool was called."""
    if not benchmark.is_binary or not {Arm.TOOLS.value, Arm.NO_TOOLS.value} <= scores.keys():
        return {}
    tools, without = scores[Arm.TOOLS.value], scores[Arm.NO_TOOLS.value]
    shared = [i for i in items if i.sample.id in tools and i.sample.id in without]
    if not shared:
        return {}
    given = answers.of(Arm.TOOLS.value)
    with_N, without_N, called_N = (
        torch.tensor([bool(value(item.sample.id)) for item in shared])
        for value in (
            lambda name: tools[name]["score"],
            lambda name: without[name]["score"],
            lambda name: given[name].calls,
        )
    )
    clusters = [item.cluster for item in shared]
    return {
        name: hierarchical_interval(terms_N.double().numpy(), clusters).to_dict()
        for name, terms_N in gain_and_harm(with_N, without_N, called_N).named().items()
    }


def _sampled(
    benchmark: Benchmark,
    items: Sequence[Item],
    answers: AnswerFile,
    count: int,
    judge: Judge | None,
) -> dict[str, Any]:
    """avg@n, the mean over answers of each measure; and pass@k, where an answer is right or wrong.

    An item that has no score in one of the answers leaves all of them.
    """
    rounds = [
        score_answers(benchmark, items, answers.of(SAMPLED, n), judge)[0] for n in range(count)
    ]
    complete = [i for i in items if all(i.sample.id in scores for scores in rounds)]
    if not complete:
        return {"samples": count, "items": 0, "measures": {}, "pass_at_k": {}}
    draws = [draws_of(benchmark, complete, scores) for scores in rounds]
    measures = {name: _entry(mean_of([one[name] for one in draws])) for name in draws[0]}
    curve: dict[str, Any] = {}
    if benchmark.is_binary:
        ids = [item.sample.id for item in complete]
        right = {i: round(sum(scores[i]["score"] for scores in rounds)) for i in ids}
        clusters = {item.sample.id: item.cluster for item in complete}
        curve = pass_curve(SampledAnswers(right, count, clusters, {}))
    return {
        "samples": count,
        "items": len(complete),
        "left_out": len(items) - len(complete),
        "measures": measures,
        "pass_at_k": curve,
    }
