"""From outcomes to results.json and to a table: every measure with its interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from reframe_vl.evaluation.intervals import hierarchical_interval
from reframe_vl.evaluation.metrics import gain_and_harm, observation_dependence, tool_gain
from reframe_vl.evaluation.outcomes import Arm, EvaluationResult, Outcome

Terms = dict[str, float]
"""The value of each item, by its id."""


@dataclass(frozen=True)
class Run:
    """One evaluated checkpoint.

    Attributes:
        base: The frozen base on the same items; None where it was not evaluated.
        base_name: Which base the policy was trained from.
        seed: Of the training.
    """

    policy: EvaluationResult
    base: EvaluationResult | None = None
    base_name: str = ""
    seed: int = 0


def results(policy: EvaluationResult, base: EvaluationResult | None = None) -> dict[str, Any]:
    """The content of results.json for one checkpoint (docs/configuration.md).

    Every measure is ``{"value", "low", "high"}``, or null where an arm it needs was not played.
    """
    return results_over_runs([Run(policy, base)])


def results_over_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """The same for several checkpoints, with intervals over bases, seeds and media.

    Raises:
        ValueError: There are no runs, or only some have a base.
    """
    with_base = {run.base is not None for run in runs}
    if len(with_base) != 1:
        raise ValueError(
            f"{len(runs)} runs, some with a base and some without: give at least one run, and "
            "either all bases or none."
        )
    columns = [measures(run.policy, run.base) for run in runs]
    report: dict[str, Any] = {"accuracy": {}, "visual_tokens": {}}
    for group, name in columns[0]:
        section = report[group] if group else report
        section[name] = interval(runs, [column[group, name] for column in columns])
    left_out: dict[str, Counter[str]] = {}
    for run in runs:
        for scope, reasons in run.policy.left_out.items():
            left_out.setdefault(scope, Counter()).update(reasons)
    report["items"] = sum(run.policy.num_items for run in runs)
    report["left_out"] = {scope: dict(reasons) for scope, reasons in left_out.items()}
    bases = [Run(r.base, None, r.base_name, r.seed) for r in runs if r.base is not None]
    report["base"] = results_over_runs(bases) if bases else None
    return report


def table(report: Mapping[str, Any]) -> Table:
    """The main measures, the base beside the trained policy where both are in the report."""
    base = report.get("base")
    shown = Table(title=f"{report['items']} items, 95% intervals")
    shown.add_column("measure")
    for name in ("base", "trained") if base else ("policy",):
        shown.add_column(name, justify="right", no_wrap=True)
    sampled = [(f"pass@{k}", "pass_at_k", k) for k in report.get("pass_at_k", ())]
    for label, *path in (*_ROWS, *sampled):
        cells = [_cell(part, path) for part in ((base, report) if base else (report,))]
        if set(cells) != {_NOTHING}:
            shown.add_row(label, *cells)
    return shown


_NOTHING = "-"


_ROWS = (
    ("accuracy with tools", "accuracy", "tools"),
    ("accuracy without tools", "accuracy", "no_tools"),
    ("accuracy with the original dropped", "accuracy", "dropped"),
    ("accuracy on the conflict set", "accuracy", "conflict"),
    ("tool gain", "tool_gain"),
    ("tool gain over the base without tools", "tool_gain_vs_base"),
    ("observation dependence", "observation_dependence"),
    ("IoU of calls with the evidence", "grounding_iou"),
    ("items with a call", "call_rate"),
)


def _cell(report: Mapping[str, Any], path: Sequence[str]) -> str:
    entry: Any = report
    for name in path:
        entry = entry[name]
    if entry is None:
        return _NOTHING
    # Square brackets would be markup to the table.
    return f"{entry['value']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"


def measures(
    policy: EvaluationResult, base: EvaluationResult | None = None
) -> dict[tuple[str, str], Terms]:
    """The items' terms of every measure, by section and name; empty where it is not defined.

    The section is that of results.json: ``accuracy``, ``visual_tokens``, or empty for its top.
    """
    arms = {arm: policy.outcomes.get(arm, {}) for arm in Arm}
    tools, no_tools = arms[Arm.TOOLS], arms[Arm.NO_TOOLS]
    base_no_tools = base.outcomes.get(Arm.NO_TOOLS, {}) if base else {}
    kept = [arms[arm] for arm in (Arm.TRUE, Arm.RANDOM, Arm.BLANK)]
    dropped = [arms[a] for a in (Arm.TRUE_DROPPED, Arm.RANDOM_DROPPED, Arm.BLANK_DROPPED)]
    named: dict[str, Terms] = {
        "tool_gain": _paired(tool_gain, tools, no_tools),
        "tool_gain_vs_base": _paired(tool_gain, tools, base_no_tools),
        **_gain_and_harm(tools, no_tools),
        "observation_dependence": _paired(observation_dependence, *kept),
        "observation_dependence_dropped": _paired(observation_dependence, *dropped),
        "observation_dependence_vs_random": _paired(_true_minus_random, *kept[:2]),
        "grounding_iou": {name: o.iou for name, o in tools.items() if o.iou is not None},
        "call_rate": {name: float(o.calls > 0) for name, o in tools.items()},
        "calls_per_answer": {name: float(o.calls) for name, o in tools.items()},
    }
    return {
        **{("accuracy", a): {n: float(o.correct) for n, o in i.items()} for a, i in arms.items()},
        **{("", name): terms for name, terms in named.items()},
        **{
            ("visual_tokens", a): {n: float(o.visual_tokens) for n, o in i.items()}
            for a, i in arms.items()
        },
    }


def _gain_and_harm(
    tools: Mapping[str, Outcome], no_tools: Mapping[str, Outcome]
) -> dict[str, Terms]:
    shared = _shared(tools, no_tools)
    called = torch.tensor([tools[name].calls > 0 for name in shared], dtype=torch.bool)
    terms = gain_and_harm(_right(tools, shared), _right(no_tools, shared), called)
    return {
        name: dict(zip(shared, values.tolist(), strict=True))
        for name, values in terms.named().items()
    }


def _true_minus_random(true_N: Tensor, random_N: Tensor) -> Tensor:
    return observation_dependence(true_N, random_N, None)


def _paired(term: Callable[..., Tensor], *arms: Mapping[str, Outcome]) -> Terms:
    """A measure's terms on the items that all its arms hold."""
    shared = _shared(*arms)
    return dict(zip(shared, term(*(_right(arm, shared) for arm in arms)).tolist(), strict=True))


def _shared(*arms: Mapping[str, Outcome]) -> list[str]:
    return [name for name in arms[0] if all(name in arm for arm in arms)]


def _right(arm: Mapping[str, Outcome], names: Sequence[str]) -> Tensor:
    return torch.tensor([arm[name].correct for name in names], dtype=torch.bool)


def interval(
    runs: Sequence[Run], columns: Sequence[Terms], strata: Mapping[str, str] | None = None
) -> dict[str, float] | None:
    """The mean of terms over runs and items with its interval; None where there are no terms.

    Args:
        runs: Where the terms are from: base, seed, and the media of the items.
        columns: Terms of each run.
        strata: The set that each item is from, where there are several: they count the same.
    """
    rows = [
        (value, run.policy.media[name], run.base_name, run.seed, strata[name] if strata else "")
        for run, terms in zip(runs, columns, strict=True)
        for name, value in terms.items()
    ]
    if not rows:
        return None
    values, media, bases, seeds, sets = zip(*rows, strict=True)
    return hierarchical_interval(
        np.array(values, np.float64), media, bases=bases, seeds=seeds, strata=sets
    ).to_dict()
