import json

import pytest
from omegaconf import OmegaConf

from reframe_vl.runs import IDENTITY, POLICY, RESULTS, ConfigError
from reframe_vl.sweeps import gather, main, number, objective


def run(folder, overrides, accuracy=None):
    folder.mkdir(parents=True)
    (folder / IDENTITY).write_text(json.dumps({"overrides": overrides, "settings": {}}))
    if accuracy is not None:
        measure = {"value": accuracy, "low": 0.0, "high": 1.0}
        (folder / RESULTS).write_text(json.dumps({"accuracy": {"tools": measure}, "items": 4}))


@pytest.fixture
def sweep(tmp_path):
    for index, (lr, seed, accuracy) in enumerate(
        [("1e-4", 0, 0.5), ("1e-4", 1, 0.7), ("1e-3", 0, 0.9), ("1e-3", 1, None)]
    ):
        run(tmp_path / "a" / str(index), [f"lr={lr}", f"seed={seed}", "steps=3"], accuracy)
    return tmp_path


def test_runs_of_one_setting_are_put_together_over_their_seeds(sweep):
    low, high = gather([sweep])
    assert (low.overrides, high.overrides) == ({"lr": "1e-4"}, {"lr": "1e-3"})
    assert low.values("accuracy.tools") == [0.5, 0.7]
    assert [seed for seed, _ in low.runs] == ["0", "1"]
    assert (low.unfinished, high.unfinished) == (0, 1)


def test_a_run_that_ends_without_results_is_finished_once_its_policy_is_there(sweep):
    for name, evaluate in (("done", "false"), ("to evaluate", "true")):
        run(sweep / "a" / name, ["lr=1e-2", "seed=0"])
        (sweep / "a" / name / "config.yaml").write_text(f"evaluate: {evaluate}\n")
        (sweep / "a" / name / POLICY).mkdir()
    [row] = [row for row in gather([sweep]) if row.overrides["lr"] == "1e-2"]
    assert (row.runs, row.unfinished) == ([("0", {})], 1)


def test_a_run_directory_and_an_experiments_folder_can_be_given(sweep):
    assert len(gather([sweep / "a" / "0"])) == 1
    assert gather([sweep]) == gather([sweep / "a"])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        gather([sweep / "nothing"])


def test_the_best_setting_comes_first_and_files_have_each_run(sweep, capsys):
    main([str(sweep), "--csv", str(sweep / "out.csv")])
    text = capsys.readouterr().out
    assert text.index("1e-3") < text.index("1e-4")
    assert "0.600 ± 0.141" in text and "1 (+1 unfinished)" in text
    lines = (sweep / "out.csv").read_text().splitlines()
    assert lines[0] == "lr,seed,measure,value"
    assert lines[1:] == [
        "1e-4,0,accuracy.tools,0.5",
        "1e-4,1,accuracy.tools,0.7",
        "1e-3,0,accuracy.tools,0.9",
    ]


def test_a_measure_is_a_number_of_the_results_or_none():
    results = {"items": 4, "tool_gain": None, "accuracy": {"tools": {"value": 0.5}}}
    assert number(results, "items") == 4.0
    assert number(results, "tool_gain") is None
    assert number(results, "accuracy.blank") is None


def test_what_a_sweep_looks_for_must_be_in_the_results():
    cfg = OmegaConf.create({"objective": "accuracy.tools"})
    assert objective(cfg, {"accuracy": {"tools": {"value": 0.5}}}) == 0.5
    with pytest.raises(ConfigError, match="evaluate=false"):
        objective(cfg, {})
    assert objective(OmegaConf.create({"objective": None}), {}) is None
