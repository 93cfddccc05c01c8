import json

import pytest
from mini_claims import CLAIMS, SETTINGS, answers, contributions
from mini_gdgrpo import grid, quick_grid
from mini_gdgrpo_report import write_report
from mini_rows import ProtocolError, Rows, Settings, digest, protocol
from mini_runs import BASE, FULL, OUTCOME, STRONG, Run, frozen_base, other_modality
from mini_statistics import (
    AREA,
    END,
    Measurements,
    difference,
    joint,
    verdict,
    verdict_of_no_change,
)

from reframe_vl.evaluation.outcomes import Arm, EvaluationResult, Outcome
from reframe_vl.evaluation.packing import Items, pack

SETTINGS_OF_TEST = Settings(steps=4, every=2, items=8, curve_items=4)
ITEMS = Items({f"i{i}": f"m{i}" for i in range(8)}, {f"c{i}": f"n{i}" for i in range(8)})


def played(right: dict[Arm, int], count: int = 8) -> dict:
    """Packed outcomes: in each arm the first so many items are right."""
    outcomes = {}
    for arm in Arm:
        names = list(ITEMS.of(arm))[:count]
        number = right.get(arm, 0)
        outcomes[arm] = {n: Outcome(i < number, 1, 32, 0.5) for i, n in enumerate(names)}
    media = dict(ITEMS.main) | dict(ITEMS.conflict)
    none = {"all": {}, "forced": {}, "conflict": {}}
    return pack(EvaluationResult(outcomes, media, count, none), ITEMS)


def keep(rows: Rows, fingerprint: str, run: Run, right: dict[Arm, int]) -> None:
    """Writes a row as a run would, with the same outcomes all along the curve."""
    items = {"main": dict(ITEMS.main), "conflict": dict(ITEMS.conflict)}
    rows.keep_items(run.world, items)
    few = {arm: min(number, 4) for arm, number in right.items()}
    rows.write(
        run.name,
        {
            "overrides": run.overrides(SETTINGS_OF_TEST),
            "fingerprint": fingerprint,
            "commit": "0000000",
            "machine": "none",
            "seconds": {"training": 1.0, "evaluation": 1.0},
            "final": played(right),
            "curve": {} if run.method == BASE else {"2": played(few, 4)},
            "cross": played(right) if run.is_specialist else None,
        },
    )


@pytest.fixture
def rows(tmp_path):
    """GD-GRPO that uses its tool and outcome GRPO that does not, from two bases."""
    rows = Rows(tmp_path / "rows")
    fingerprint = rows.begin(SETTINGS_OF_TEST)
    for base in (0, 1):
        full, outcome = (Run("image", STRONG, method, base) for method in (FULL, OUTCOME))
        start = dict.fromkeys(Arm, 2)
        keep(rows, fingerprint, frozen_base(full), start)
        keep(rows, fingerprint, other_modality(full), start)
        keep(
            rows,
            fingerprint,
            full,
            start | {Arm.TOOLS: 8, Arm.TRUE: 8, Arm.RANDOM: 4, Arm.BLANK: 4},
        )
        keep(rows, fingerprint, outcome, start)
    return rows


def interval(low, high):
    return {"value": (low + high) / 2, "low": low, "high": high}


def test_a_difference_is_shown_where_its_interval_leaves_out_zero():
    assert verdict(interval(0.01, 0.2)) == "shown"
    assert verdict(interval(-0.2, -0.01)) == "reversed"
    assert verdict(interval(0.0, 0.2)) == verdict(interval(-0.1, 0.2)) == "not shown"


def test_no_change_is_shown_within_the_margin_and_reversed_outside_of_it():
    assert verdict_of_no_change(interval(-0.05, 0.05)) == "shown"
    assert verdict_of_no_change(interval(-0.01, 0.06)) == "not shown"
    assert verdict_of_no_change(interval(0.06, 0.2)) == "reversed"
    assert verdict_of_no_change(interval(-0.2, -0.06)) == "reversed"


def test_a_claim_of_several_parts_needs_all_of_them():
    assert joint(["shown", "shown"]) == "shown"
    assert joint(["shown", "not shown"]) == "not shown"
    assert joint(["shown", "not shown", "reversed"]) == "reversed"


def test_contrasts_are_paired_by_base_seed_and_item(rows):
    measured = Measurements(grid(), rows)
    world = SETTINGS[str(STRONG)]
    gain = measured.contrast(*world, difference(FULL, OUTCOME, "tool_gain"))
    assert gain["value"] == pytest.approx(6 / 8) and gain["runs"] == 2
    # Both curves start at the base: at step 2 two of four more are right, at step 4 two of these.
    area = measured.contrast(*world, difference(FULL, OUTCOME, "tool_gain"), AREA)
    assert area["value"] == pytest.approx((0 / 2 + 2 / 4 + 2 / 4 / 2) / 2)
    level = measured.contrast(*world, [(1.0, BASE, "accuracy")])
    assert level["value"] == pytest.approx(2 / 8)


def test_claims_are_answered_only_where_runs_speak_to_them(rows):
    measured = Measurements(grid(), rows)
    found = answers(measured, "0.9")
    verdicts = [found[claim]["verdict"] for claim in CLAIMS]
    assert verdicts == ["shown", "shown", "shown", "not shown"]
    assert answers(measured, "video") == {}
    assert contributions(measured, "accuracy", END) == {}


def test_a_report_can_be_written_from_the_rows_there_are(rows, tmp_path, capsys):
    write_report(grid(), rows, tmp_path, None)
    content = json.loads((tmp_path / "mini_gdgrpo.json").read_text())
    assert content.keys() == {"command", "commit", "machine", "rows", "summary"}
    assert content["summary"]["0.9"]["gdgrpo"]["tool_gain"]["value"] == pytest.approx(6 / 8)
    assert len(content["summary"]["runs"]["missing"]) == len(grid()) - 8
    specialists = content["summary"]["cross_modality"]["image specialists"]
    assert specialists["tool_gain"]["level"]["value"] == pytest.approx(6 / 8)
    page = (tmp_path / "mini_gdgrpo.md").read_text()
    assert "Partial: 8 of" in page and "video-0.9-gdgrpo-base2-seed0" in page
    assert (tmp_path / "mini_gdgrpo.png").is_file()


def test_rows_of_another_protocol_are_refused_and_the_change_is_named(rows):
    with pytest.raises(ProtocolError, match="every: was 2, is 3"):
        rows.begin(Settings(steps=4, every=3, items=8, curve_items=4))
    run = Run("image", STRONG, FULL, 0)
    row = rows.read(run.name) | {"fingerprint": "another"}
    rows.write(run.name, row)
    with pytest.raises(ProtocolError, match="another protocol"):
        Measurements(grid(), rows)


def test_runs_on_other_items_cannot_be_kept(rows):
    with pytest.raises(ProtocolError, match="other items"):
        rows.keep_items("image-0.9", {"main": {"x": "y"}, "conflict": {}})


def test_a_protocol_is_what_the_files_say_not_how(tmp_path):
    code, config = tmp_path / "a.py", tmp_path / "a.yaml"
    code.write_text('"""Text."""\n\nX = 1  # why\n')
    config.write_text("a: 1\nb: 2\n")
    before = digest(code), digest(config)
    code.write_text('"""Other text."""\nX = 1\n')
    config.write_text("# why\nb: 2\na: 1\n")
    assert (digest(code), digest(config)) == before
    code.write_text("X = 2\n")
    config.write_text("a: 1\nb: 3\n")
    assert digest(code) != before[0] and digest(config) != before[1]


def test_the_protocol_holds_world_bases_and_settings_but_not_how_bases_were_made():
    files = protocol(Settings())["files"]
    assert "src/reframe_vl/mini/world.py" in files
    assert "src/reframe_vl/mini/assets/base_0/model.safetensors" in files
    assert "configs/experiment/grpo_outcome.yaml" in files
    assert "src/reframe_vl/mini/base_training.py" not in files


def test_the_grid_has_every_run_once_after_the_bases_it_is_compared_with():
    runs = grid()
    assert len(runs) == len({run.name for run in runs}) == 36 + 15 + 6 + 12
    for runs in (grid(), quick_grid()):
        for place, run in enumerate(runs):
            assert frozen_base(run) in runs[: place + 1]
    assert all(run.seed >= 100 for run in quick_grid() if run.method != BASE)
