import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import merge as script
from checkpoint_folders import merged, weights
from merge import merge
from reframe_vl.algorithms.gdgrpo import GDGRPO
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.evaluating import load_checkpoint
from reframe_vl.mini.model import base_folder as shipped
from reframe_vl.policy.loading import LoRASettings, load_policy

ROOT = Path(__file__).parents[2]


def composed(name, **given):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose(name)
    return OmegaConf.merge(cfg, given)


@pytest.fixture
def run(made, tmp_path):
    """The directory of a run with adapters that was stopped after a step."""
    lora = {"_target_": "reframe_vl.policy.loading.LoRASettings", "rank": 4}
    model = {"_target_": "reframe_vl.policy.loading.load_policy", "path": str(made[0])}
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    OmegaConf.save({"model": {**model, "lora": lora}}, run / "config.yaml")
    policy = load_policy(made[0], lora=LoRASettings(rank=4))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    module = GDGRPO(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1))
    checkpoint = {"state_dict": module.state_dict(), "epoch": 3}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, run / "checkpoints" / "step_000003.ckpt")
    policy.model.model.save_pretrained(tmp_path / "adapter")
    return run


def test_runs_their_checkpoints_and_folders_are_merged(made, run, tmp_path):
    base, one, _ = made
    file = run / "checkpoints" / "step_000003.ckpt"
    given = [str(path) for path in (run, file, one)]
    cfg = composed("merge", base=str(base), checkpoints=given, output=str(tmp_path / "out" / "m"))
    merge(OmegaConf.merge(cfg, {"weights": [0.5, 0.25, 0.25], "method": "task_arithmetic"}))
    folders = (base, tmp_path / "adapter", one)
    expected = merged(
        folders, tmp_path / "expected", method="task_arithmetic", weights=[0.75, 0.25]
    )
    found = weights(tmp_path / "out" / "m")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    record = json.loads((tmp_path / "out" / "m" / "merge.json").read_text())
    assert (record["base"], record["checkpoints"]) == (str(base), given)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m"]


def test_a_finished_run_gives_its_policy_and_a_merge_can_be_evaluated(made, run, tmp_path):
    base, one, _ = made
    one_policy = load_policy(one)
    export_policy(one_policy, run / "policy")
    merge(
        composed("merge", base=str(base), checkpoints=[str(run)], output=str(tmp_path / "merged"))
    )
    policy = load_checkpoint(composed("eval"), tmp_path / "merged")
    found = dict(policy.model.named_parameters())
    for name, parameter in one_policy.model.named_parameters():
        assert torch.equal(parameter, found[name])


def test_a_checkpoint_that_is_newer_than_the_policy_is_told_of(made, run, tmp_path, caplog):
    export_policy(load_policy(made[1]), run / "policy")
    [file] = (run / "checkpoints").iterdir()
    words = f"{file} is newer than {run / 'policy'}, which is merged"
    for seconds in (-10, 10):
        time = (run / "policy" / "config.json").stat().st_mtime + seconds
        os.utime(file, (time, time))
        merge(composed("merge", checkpoints=[str(run)], output=str(tmp_path / f"out{seconds}")))
        assert (words in caplog.text) == (seconds > 0)


def test_a_shipped_base_is_named_by_its_number(tmp_path):
    merge(composed("merge", base=1, checkpoints=[str(shipped(2))], output=str(tmp_path / "out")))
    found = weights(tmp_path / "out")
    for name, tensor in weights(shipped(2)).items():
        assert torch.equal(found[name], tensor)


@pytest.fixture
def trained(tmp_path):
    """Makes a finished run: its policy, and what its settings say that it began with."""

    def make(name, start, policy):
        run = tmp_path / name
        shutil.copytree(policy, run / "policy")
        OmegaConf.save({"model": {"path": str(start)}}, run / "config.yaml")
        return run

    return make


@pytest.mark.parametrize("below", [".", "policy"])
def test_changes_are_taken_against_the_base_that_the_runs_began_with(
    made, trained, tmp_path, below
):
    base, one, two = made
    runs = [trained("a", base, one), trained("b", base, two)]
    given = [str(run / below) for run in runs]
    merge(composed("merge", method="ties", checkpoints=given, output=str(tmp_path / "out")))
    expected = merged(made, tmp_path / "expected", method="ties")
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, expected[name]), name
    record = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert record["base"] == str(base)


def test_runs_of_several_bases_are_merged_only_with_the_base_given(made, trained, tmp_path, caplog):
    base, one, two = made
    first, second = trained("a", base, one), trained("b", tmp_path / "a" / "policy", two)
    cfg = composed("merge", checkpoints=[str(first), str(second)], output=str(tmp_path / "out"))
    with pytest.raises(
        ValueError, match=rf"trained from {base}, and .*/b from .*/a/policy: .*base="
    ):
        merge(cfg)
    assert not (tmp_path / "out").exists()
    # As a chain of runs is.
    merge(OmegaConf.merge(cfg, {"base": str(base)}))
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{second} was trained from {first / 'policy'}" in warning and str(base) in warning


def test_a_base_that_is_elsewhere_now_is_asked_for(made, trained, tmp_path):
    run = trained("a", tmp_path / "gone", made[1])
    cfg = composed("merge", checkpoints=[str(run)], output=str(tmp_path / "out"))
    with pytest.raises(FileNotFoundError, match=r"[Nn]o checkpoint folder at .*/gone.* add base="):
        merge(cfg)


def test_a_path_without_a_checkpoint_is_refused_before_anything_is_written(made, tmp_path):
    cfg = composed("merge", base=str(made[0]), output=str(tmp_path / "out"))
    for path in ("nowhere", str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=f"No checkpoint at {path}: give a run"):
            merge(OmegaConf.merge(cfg, {"checkpoints": [path]}))
    assert not list(tmp_path.iterdir())


def test_f11_a_checkpoint_of_a_run_must_hold_all_that_is_trained(run):
    [file] = (run / "checkpoints").iterdir()
    checkpoint = torch.load(file, weights_only=True)
    lost = next(name for name in checkpoint["state_dict"] if "lora_B" in name)
    del checkpoint["state_dict"][lost]
    torch.save(checkpoint, file)
    with pytest.raises(ValueError, match="lacks parameters that model trains, 1 in all"):
        load_checkpoint(OmegaConf.load(run / "config.yaml"), run)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"checkpoints": None}, "give a list of paths"),
        ({"checkpoints": [None]}, "give a list of paths"),
        ({"checkpoints": [1, 2]}, "give a list of paths"),
        ({"base": True}, "the number of a shipped base"),
        ({"base": None}, "No checkpoint lies in a run .* add base="),
        ({"output": None}, "give the path of the folder"),
    ],
)
def test_what_is_no_path_is_told_in_a_sentence(made, tmp_path, given, words):
    cfg = composed("merge", base=str(made[0]), checkpoints=[str(made[1])], output=str(tmp_path))
    for name, value in given.items():
        cfg[name] = value
    with pytest.raises(ValueError, match=words):
        merge(cfg)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"dtype": "float99"}, "dtype=float99 is unknown"),
        ({"adapter": "both"}, "adapter=both is unknown: choose merged or separate"),
    ],
)
def test_what_cannot_be_consolidated_so_is_told_in_a_sentence(run, tmp_path, given, words):
    cfg = composed("merge", checkpoints=[str(run)], output=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=words):
        script.consolidate(OmegaConf.merge(cfg, given | {"method": "consolidate"}))


def test_f03_a_checkpoint_is_consolidated_in_float32_and_cast_last(made, run, tmp_path):
    given = {"method": "consolidate", "checkpoints": [str(run)]}
    for dtype in ("float32", "bfloat16"):
        cfg = composed("merge", **given, dtype=dtype, output=str(tmp_path / dtype))
        script.consolidate(cfg)
    single, half = weights(tmp_path / "float32"), weights(tmp_path / "bfloat16")
    assert any((tensor != weights(made[0])[name]).any() for name, tensor in single.items())
    for name, tensor in single.items():
        assert torch.equal(half[name], tensor.bfloat16()), name


@pytest.mark.parametrize("value, dtype", [(float("nan"), "float32"), (1e6, "float16")])
def test_f04_values_that_are_not_finite_are_not_consolidated(run, tmp_path, value, dtype):
    [file] = (run / "checkpoints").iterdir()
    checkpoint = torch.load(file, weights_only=True)
    next(t for name, t in checkpoint["state_dict"].items() if "lora_B" in name).fill_(value)
    torch.save(checkpoint, file)
    output = tmp_path / "out"
    cfg = composed("merge", checkpoints=[str(run)], output=str(output), dtype=dtype)
    with pytest.raises(ValueError, match=rf"_proj\.weight of .* is not finite in torch\.{dtype}"):
        script.consolidate(OmegaConf.merge(cfg, {"method": "consolidate"}))
    assert not output.exists()


def test_what_is_a_models_folder_already_is_not_consolidated(made, run, tmp_path):
    for path in (made[0], tmp_path / "adapter"):
        cfg = composed("merge", checkpoints=[str(path)], output=str(tmp_path / "out"))
        with pytest.raises(ValueError, match=rf"{path} is a folder that transformers .* already"):
            script.consolidate(OmegaConf.merge(cfg, {"method": "consolidate"}))


@pytest.mark.parametrize(("text", "words"), [("a: [", "cannot be read"), ("a: 1", "is no run's")])
def test_settings_of_no_run_are_told_in_a_sentence(run, tmp_path, text, words):
    (run / "config.yaml").write_text(text)
    cfg = composed("merge", checkpoints=[str(run)], output=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=words):
        script.consolidate(OmegaConf.merge(cfg, {"method": "consolidate"}))


def test_a_damaged_checkpoint_is_told_in_a_sentence(run):
    [file] = (run / "checkpoints").iterdir()
    content = bytearray(file.read_bytes())
    # Where the archive's directory is whole, but not what it tells of.
    content[100:300] = bytes(200)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: give another checkpoint"):
        load_checkpoint(OmegaConf.load(run / "config.yaml"), run)


def test_one_checkpoint_needs_no_list(made, tmp_path):
    merge(
        composed("merge", base=str(made[0]), checkpoints=str(made[1]), output=str(tmp_path / "o"))
    )
    for name, tensor in weights(made[1]).items():
        assert torch.equal(weights(tmp_path / "o")[name], tensor)


def test_what_is_not_given_is_told_in_a_sentence(tmp_path):
    command = [sys.executable, str(ROOT / "src" / "merge.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Add checkpoints=… output=… to the command" in done.stderr
    assert not list(tmp_path.iterdir())
