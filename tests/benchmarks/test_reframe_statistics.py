"""The distillation experiment's statistics, on rows of runs that were never made."""

from itertools import product

import numpy as np
import pytest
from mini_reframe import grid
from reframe_report import _claim_rows, summarise
from reframe_runs import BASE, MODALITIES, PAIRS, SHORTCUT, Run, Settings
from reframe_statistics import AREA, END, Measurements, difference

from reframe_vl.evaluation.outcomes import Arm, EvaluationResult, Outcome
from reframe_vl.evaluation.packing import Items, pack

NUM_ITEMS, NUM_CURVE = 24, 12
SETTINGS = Settings(items=NUM_ITEMS, curve_items=NUM_CURVE)
LEVELS = {BASE: 0.5, "ogmopd": 0.9}


class Rows:
    """Rows in memory."""

    def __init__(self, rows, items):
        self.rows, self.known = rows, items

    def has(self, name):
        return name in self.rows

    def read(self, name):
        return self.rows[name]

    def items(self, which):
        return self.known[which]


def items_of(modality):
    main = {f"{modality}{i}": f"key-{modality}{i}" for i in range(NUM_ITEMS)}
    return Items(main, {f"{name}c": f"{key}c" for name, key in main.items()})


ITEMS = {f"{modality}-{SHORTCUT}": items_of(modality) for modality in MODALITIES}


def played(rng, modality, share, count):
    """An evaluation on the first so many items."""
    known = ITEMS[f"{modality}-{SHORTCUT}"]
    outcomes = {
        arm: {
            name: Outcome(bool(rng.random() < share), 1, 100, 0.5)
            for name in list(known.of(arm))[:count]
        }
        for arm in Arm
        if arm is not Arm.NO_TOOLS_MATCHED
    }
    return pack(EvaluationResult(outcomes, {**known.main, **known.conflict}, count, {}), known)


@pytest.fixture(scope="module")
def rows():
    rng, rows = np.random.default_rng(0), {}
    for run in grid():
        rows[run.name] = {"steps": SETTINGS.steps(run.method)}
        for modality, end in product(MODALITIES, [LEVELS.get(run.method, 0.7)]):
            rows[run.name][modality] = {
                "final": played(rng, modality, end, NUM_ITEMS),
                "curve": {
                    str(step): played(rng, modality, (0.5 + end) / 2, NUM_CURVE)
                    for step in SETTINGS.curve(run.method)
                },
            }
    return rows


@pytest.fixture(scope="module")
def measurements(rows):
    return Measurements(grid(), Rows(rows, ITEMS))


def share_correct(rows, method, base, seed, modality, count=None, step=None):
    if method in PAIRS:
        method = PAIRS[method][MODALITIES.index(modality)]
    part = rows[Run(method, base, 0 if method == BASE else seed).name][modality]
    packed = part["final"] if step is None else part["curve"][str(step)]
    marks = packed["arms"]["tools"]["correct"][:count]
    return marks.count("1") / len(marks)


@pytest.mark.parametrize("other", ["mopd", "specialists", "merge_linear", BASE])
def test_the_value_at_the_end_is_the_mean_over_bases_seeds_and_worlds(rows, measurements, other):
    found = measurements.contrast(difference("ogmopd", other, "accuracy"))
    expected = [
        share_correct(rows, "ogmopd", *run) - share_correct(rows, other, *run)
        for run in product(range(3), range(2), MODALITIES)
    ]
    assert found["value"] == pytest.approx(np.mean(expected))
    assert found["low"] < found["value"] < found["high"]
    assert found["runs"] == 6


def test_areas_are_compared_only_under_curves_of_the_same_steps(measurements):
    for other in ("mopd", "mopd_nll", "mix_rl"):
        assert measurements.contrast(difference("ogmopd", other, "accuracy"), at=AREA)
    for other in ("merge_ties", "specialists", "mix_rl_long"):
        assert measurements.contrast(difference("ogmopd", other, "accuracy"))
        assert measurements.contrast(difference("ogmopd", other, "accuracy"), at=AREA) is None
    # Start and end alone are no curve.
    for method in ("merge_ties", "specialists"):
        assert measurements.contrast([(1.0, method, "accuracy")], at=AREA) is None
    assert measurements.contrast([(1.0, "mix_rl_long", "accuracy")], at=AREA)


def test_what_has_no_area_stands_as_a_dash_among_the_claims(measurements):
    shown = _claim_rows(summarise(measurements)["claims"])
    by_place = {(row["compared"], row["at"]): row for row in shown}
    assert by_place["at the whole budget", END]["verdict"] != "–"
    dash = by_place["at the whole budget", AREA]
    assert (dash["difference"], dash["verdict"], dash["runs"]) == ("–", "–", "–")
    assert by_place["at the distillation's budget", AREA]["verdict"] != "–"


def test_all_points_of_a_curve_are_means_of_the_same_items(rows, measurements):
    curve = measurements.curve("ogmopd", "image", "accuracy")
    assert list(curve) == [0, 30, 60, 90, 120]
    runs = list(product(range(3), range(2)))
    for step, method in ((0, BASE), (60, "ogmopd"), (120, "ogmopd")):
        expected = [
            share_correct(rows, method, *run, "image", NUM_CURVE, 60 if step == 60 else None)
            for run in runs
        ]
        assert curve[step] == pytest.approx(expected)


def test_a_world_without_a_measure_has_no_mean_of_both(rows):
    kept = {name: dict(row) for name, row in rows.items()}
    for name, row in kept.items():
        arms = dict(row["video"]["final"]["arms"])
        del arms["conflict"]
        kept[name] = row | {"video": {"curve": {}, "final": row["video"]["final"] | {"arms": arms}}}
    found = Measurements(grid(), Rows(kept, ITEMS))
    assert found.contrast([(1.0, "ogmopd", "conflict")], "image")
    assert found.contrast([(1.0, "ogmopd", "conflict")]) is None
