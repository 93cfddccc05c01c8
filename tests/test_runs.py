import json
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from reframe_vl import runs


def config(run, **changes):
    base = {"lr": 1e-3, "data": {"shortcut": 0.5}, "steps": 4, "resume": None, "run_name": None}
    return OmegaConf.create(base | {"paths": {"run_dir": str(run)}} | changes)


def started(tmp_path, name="a", overrides=("lr=1e-3",), **changes):
    run = tmp_path / "exp" / name
    run.mkdir(parents=True)
    runs.begin(config(run, **changes), run)
    runs.claim(config(run, **changes), run)
    identity = json.loads((run / runs.IDENTITY).read_text())
    (run / runs.IDENTITY).write_text(json.dumps(identity | {"overrides": list(overrides)}))
    return run


def test_a_fresh_run_never_writes_into_anothers_directory(tmp_path):
    run = started(tmp_path)
    with pytest.raises(runs.ConfigError, match="resume=auto"):
        runs.begin(config(run), run)
    runs.begin(config(run, resume="auto"), run)


def test_a_run_goes_on_only_with_the_settings_it_was_started_with(tmp_path):
    run = started(tmp_path)
    with pytest.raises(runs.ConfigError, match=r"data\.shortcut: was 0\.5, is 0\.9"):
        runs.begin(config(run, resume="auto", data={"shortcut": 0.9}), run)
    # How long it runs is no part of what it is.
    runs.begin(config(run, resume="auto", steps=9), run)
    runs.claim(config(run, resume="auto", steps=9), run)
    assert OmegaConf.load(run / "config.yaml").steps == 9


def test_what_the_gate_and_the_ground_drop_do_is_part_of_what_a_run_is(tmp_path):
    callbacks = {
        "gate": {"threshold": {"value": 0.5}},
        "ground_drop": None,
        "progress": {"every": 1},
    }
    run = started(tmp_path, callbacks=callbacks)
    runs.begin(config(run, resume="auto", callbacks=callbacks | {"progress": None}), run)
    with pytest.raises(runs.ConfigError, match=r"callbacks\.gate\.threshold\.value: was 0\.5"):
        runs.begin(config(run, resume="auto", callbacks=callbacks | {"gate": None}), run)


def test_a_run_from_before_callbacks_were_kept_goes_on(tmp_path):
    callbacks = {"gate": None, "ground_drop": {"mode": "bernoulli"}}
    run = started(tmp_path, callbacks=callbacks)
    identity = json.loads((run / runs.IDENTITY).read_text())
    del identity["settings"]["callbacks"]
    (run / runs.IDENTITY).write_text(json.dumps(identity))
    runs.begin(config(run, resume="auto", callbacks=callbacks), run)


def test_a_server_may_have_moved_when_a_run_goes_on(tmp_path):
    run = started(tmp_path, teachers={"spatial": "http://node7:8000"})
    runs.begin(config(run, resume="auto", teachers={"spatial": "http://node9:8001"}), run)
    with pytest.raises(
        runs.ConfigError, match=r"teachers\.spatial: was http://node7:8000, is logs"
    ):
        runs.begin(config(run, resume="auto", teachers={"spatial": "logs/a"}), run)


def test_a_run_that_was_finished_with_fewer_steps_is_not_finished(tmp_path):
    run = started(tmp_path, steps=20)
    (run / runs.RESULTS).write_text("{}")
    assert runs.read_results(run) == runs.read_results(run, 20) == {}
    assert runs.read_results(run, 240) is None
    # Once it goes on, it has no results until it is finished again.
    (run / runs.POLICY).mkdir()
    (run / runs.POLICY / "config.json").write_text("{}")
    runs.claim(config(run, steps=240), run)
    assert not (run / runs.RESULTS).exists() and not (run / runs.POLICY).exists()
    # And what it had is kept.
    assert (run / "results_20_steps.json").read_text() == "{}"
    assert (run / "policy_20_steps" / "config.json").is_file()


def test_auto_finds_the_newest_run_of_the_same_overrides_in_any_order(tmp_path):
    overrides = ["seed=1", "lr=1e-3"]
    started(tmp_path, "2026-01-01", overrides)
    newest = started(tmp_path, "2026-01-02", overrides[::-1])
    started(tmp_path, "2026-01-03", ["seed=2"])
    found = runs.run_directory(str(tmp_path), "exp", "auto", None, [*overrides, "resume=auto"])
    assert found == str(newest)
    fresh = runs.run_directory(str(tmp_path), "exp", "auto", None, ["seed=3"])
    assert not (tmp_path / "exp" / fresh).exists()


def test_what_starts_a_run_is_no_part_of_what_it_is(tmp_path):
    run = started(tmp_path, "2026-01-01", ["lr=1e-3"])
    by_slurm = ["launcher=slurm", "lr=1e-3"]
    assert runs.run_directory(str(tmp_path), "exp", "auto", None, by_slurm) == str(run)
    fresh = runs.run_directory(str(tmp_path), "exp", None, None, by_slurm)
    assert fresh.endswith("_lr-1e-3") and "launcher" not in fresh


def test_a_path_names_a_run_or_one_of_its_checkpoints_and_nothing_else(tmp_path):
    run = started(tmp_path)
    checkpoint = run / runs.CHECKPOINTS / "step_000001.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("x")
    for path in (run, checkpoint):
        assert runs.run_directory(str(tmp_path), "exp", str(path), None, []) == str(run)
    stray = tmp_path / "a" / "b" / "foo.txt"
    stray.parent.mkdir(parents=True)
    stray.write_text("x")
    for path in (stray, tmp_path):
        assert str(tmp_path / "exp") in runs.run_directory(
            str(tmp_path), "exp", str(path), None, []
        )


def test_a_run_is_held_by_one_process_at_a_time(tmp_path):
    refused = pytest.raises(runs.ConfigError, match="Another process")
    with runs.lock(tmp_path), refused, runs.lock(tmp_path):
        pass
    with runs.lock(tmp_path):
        pass


def test_checkpoints_are_ordered_by_step_and_incomplete_ones_passed_over(tmp_path):
    folder = tmp_path / runs.CHECKPOINTS
    folder.mkdir()
    assert runs.latest_checkpoint(tmp_path) is None
    for step in (3, 12):
        with zipfile.ZipFile(folder / f"step_{step:06d}.ckpt", "w") as archive:
            archive.writestr("a", "b")
    (folder / "step_000020.ckpt").write_bytes(b"PK half")
    assert runs.latest_checkpoint(tmp_path).name == "step_000012.ckpt"


def test_results_that_were_cut_short_count_as_none(tmp_path):
    assert runs.read_results(tmp_path) is None
    (tmp_path / runs.RESULTS).write_text("")
    assert runs.read_results(tmp_path) is None
    (tmp_path / runs.RESULTS).write_text('{"items": 4}')
    assert runs.read_results(tmp_path) == {"items": 4}


def test_what_goes_wrong_at_the_start_is_told_in_a_sentence():
    with pytest.raises(runs.ConfigError, match="the sentence"), runs.readable_errors():
        raise ValueError("the sentence")


def test_a_run_directory_is_absolute_so_that_a_sweep_cannot_nest_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runs.run_directory("./logs", "exp", None, "a", []) == str(tmp_path / "logs/exp/a")


def test_a_full_disk_leaves_no_half_of_what_a_run_is(tmp_path, monkeypatch):
    def full(path, text):
        path.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    run = started(tmp_path)
    before = (run / "config.yaml").read_text()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_text", full)
        runs.claim(config(run, steps=9), run)
    assert (run / "config.yaml").read_text() == before
    fresh = tmp_path / "exp" / "b"
    fresh.mkdir()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_text", full)
        runs.claim(config(fresh), fresh)
    assert not (fresh / runs.IDENTITY).exists()


def test_a_run_that_was_never_set_up_leaves_its_name_free(tmp_path):
    for lr in (1.0, 2.0):
        runs.begin(config(tmp_path, lr=lr), tmp_path)
    runs.claim(config(tmp_path, lr=2.0), tmp_path)
    with pytest.raises(runs.ConfigError, match="already holds a run"):
        runs.begin(config(tmp_path, lr=2.0), tmp_path)
