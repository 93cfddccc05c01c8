import io

import pytest
from rich.console import Console

from reframe_vl.evaluation.outcomes import Arm, EvaluationResult, Outcome
from reframe_vl.evaluation.report import Run, results, results_over_runs, table

MEASURES = {
    "tool_gain",
    "tool_gain_vs_base",
    "gain",
    "harm",
    "gain_called",
    "gain_not_called",
    "harm_called",
    "harm_not_called",
    "observation_dependence",
    "observation_dependence_dropped",
    "observation_dependence_vs_random",
    "grounding_iou",
    "call_rate",
    "calls_per_answer",
}


def outcome(correct, calls=0, visual_tokens=16, iou=None):
    return Outcome(bool(correct), calls, visual_tokens, iou)


def evaluation(arms, **kw):
    outcomes = {arm: dict(items) for arm, items in arms.items()}
    names = {name for items in outcomes.values() for name in items}
    fields = {"num_items": len(names), "left_out": {"all": {}, "forced": {}, "conflict": {}}} | kw
    return EvaluationResult(outcomes, {name: name for name in names}, **fields)


def flags(text, **kw):
    return {str(i): outcome(c == "1", **kw) for i, c in enumerate(text)}


def policy():
    tools = flags("1100") | {"0": outcome(1, 2, 48, 0.5), "2": outcome(0, 1, 32, 0.25)}
    return evaluation(
        {
            Arm.TOOLS: tools,
            Arm.NO_TOOLS: flags("0010"),
            Arm.TRUE: flags("111"),
            Arm.RANDOM: flags("100"),
            Arm.BLANK: flags("000"),
        },
        left_out={"all": {"failed": 2}, "forced": {"no_control": 1}, "conflict": {}},
    )


def values(report):
    return {name: report[name] and report[name]["value"] for name in MEASURES}


def test_results_have_the_agreed_keys_and_values():
    report = results(policy(), evaluation({Arm.NO_TOOLS: flags("1000")}))
    assert set(report) == {"accuracy", "visual_tokens", "items", "left_out", "base", *MEASURES}
    assert set(report["accuracy"]) == set(report["visual_tokens"]) == set(Arm)
    assert report["accuracy"]["tools"]["value"] == 0.5
    assert report["accuracy"]["true"]["value"] == 1
    assert report["accuracy"]["conflict"] is None
    assert report["visual_tokens"]["tools"]["value"] == 28
    assert report["items"] == 4
    assert report["left_out"] == {"all": {"failed": 2}, "forced": {"no_control": 1}, "conflict": {}}
    assert values(report) == pytest.approx(
        {
            "tool_gain": 0.25,
            "tool_gain_vs_base": 0.25,
            "gain": 0.5,
            "harm": 0.25,
            "gain_called": 0.25,
            "gain_not_called": 0.25,
            "harm_called": 0.25,
            "harm_not_called": 0.0,
            "observation_dependence": 1 - (1 / 3 + 0) / 2,
            "observation_dependence_dropped": None,
            "observation_dependence_vs_random": 2 / 3,
            "grounding_iou": 0.375,
            "call_rate": 0.5,
            "calls_per_answer": 0.75,
        }
    )
    for name in MEASURES - {"observation_dependence_dropped"}:
        assert set(report[name]) == {"value", "low", "high"}
        assert report[name]["low"] <= report[name]["value"] <= report[name]["high"]
    assert report["base"]["accuracy"]["no_tools"]["value"] == 0.25
    assert report["base"]["base"] is None


def test_without_a_base_its_measures_are_null():
    report = results(policy())
    assert report["tool_gain_vs_base"] is None and report["base"] is None


def test_measures_are_paired_on_the_items_that_both_sides_hold():
    report = results(policy(), evaluation({Arm.NO_TOOLS: {"1": outcome(0), "9": outcome(1)}}))
    assert report["tool_gain_vs_base"]["value"] == 1.0


def test_runs_are_averaged_with_intervals_over_bases_and_seeds():
    good = evaluation({Arm.TOOLS: flags("11"), Arm.NO_TOOLS: flags("00")})
    bad = evaluation({Arm.TOOLS: flags("00"), Arm.NO_TOOLS: flags("00")})
    runs = [Run(good, bad, "a", 0), Run(good, bad, "a", 1), Run(bad, bad, "b", 0)]
    report = results_over_runs(runs)
    assert report["tool_gain"] == {"value": 0.5, "low": 0.0, "high": 1.0}
    assert report["base"]["accuracy"]["tools"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert report["items"] == 6
    with pytest.raises(ValueError, match="either all bases or none"):
        results_over_runs([Run(good, bad), Run(good)])
    with pytest.raises(ValueError, match="0 runs"):
        results_over_runs([])


@pytest.mark.parametrize("base", [None, evaluation({Arm.NO_TOOLS: flags("1000")})])
def test_the_table_shows_every_measure_that_there_is_for_base_and_policy(base):
    stream = io.StringIO()
    shown = table(results(policy(), base))
    Console(file=stream, width=120).print(shown)
    text = stream.getvalue()
    assert len(shown.columns) == (3 if base else 2)
    # Two arms were not played; nothing is gained over no base.
    assert shown.row_count == (7 if base else 6)
    assert "0.500 (" in text and " to " in text
    assert ("trained" in text) == bool(base)


def test_the_table_shows_pass_at_k_where_it_was_measured_and_no_row_of_nothing():
    report = results(evaluation({Arm.TOOLS: flags("1100")}))
    report["pass_at_k"] = {"1": {"value": 0.25, "low": 0.0, "high": 0.5}}
    stream = io.StringIO()
    Console(file=stream, width=120).print(table(report))
    rows = [line for line in stream.getvalue().splitlines() if line.startswith("│")]
    assert any("pass@1" in row and "0.250 (0.000 to 0.500)" in row for row in rows)
    assert not any("without tools" in row for row in rows)
