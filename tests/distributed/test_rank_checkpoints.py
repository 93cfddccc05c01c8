"""Checkpoints of every strategy: written whole, resumed, and consolidated for transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForImageTextToText

from checkpoint_folders import base_folder
from merge import consolidate
from rank_checkpoints import logprobs, run
from reframe_vl.checkpoint.reading import Form, form_of, read_progress, read_weights
from reframe_vl.policy.loading import load_policy

TESTS = Path(__file__).parents[1]
# Processes that wait for each other take long where cores are few.
pytestmark = pytest.mark.timeout(1200)
KINDS = ("full", "lora")


def on_two_ranks(strategy, base, jobs):
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(TESTS / "rank_checkpoints.py"), f"--strategy={strategy}", f"--base={base}"]
    done = subprocess.run(
        [*command, "--jobs", *jobs], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("base") / "tied", tied=True)


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    """Runs of two steps, of each strategy and kind of training; and some that went on."""
    root = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        run(root / "auto" / kind, base, "auto", kind == "lora", 2)
    step = "checkpoints/step_000000.ckpt"
    plain = [f"{root}/{{}}/{kind}:{kind}:2" for kind in KINDS]
    on_two_ranks("ddp", base, [job.format("ddp") for job in plain])
    resumed = [f"{root}/resumed/{kind}:{kind}:2:{root}/fsdp2/{kind}/{step}" for kind in KINDS]
    from_file = f"{root}/from_file/lora:lora:2:{root}/ddp/lora/{step}"
    on_two_ranks("fsdp2", base, [*(job.format("fsdp2") for job in plain), *resumed, from_file])
    return root


def composed(**given):
    with initialize_config_dir(str(TESTS.parent / "configs"), version_base="1.3"):
        return OmegaConf.merge(compose("merge"), {"method": "consolidate", **given})


def live(run):
    return torch.load(run / "live.pt")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_f07_f20_consolidated_checkpoints_say_what_the_live_model_says(
    made, strategy, kind, tmp_path
):
    run = made / strategy / kind
    for number, given in enumerate((run, run / "checkpoints" / "step_000001.ckpt")):
        output = tmp_path / str(number)
        consolidate(composed(checkpoints=[str(given)], output=str(output)))
        said = logprobs(load_policy(output))
        torch.testing.assert_close(said, live(run)["said"], rtol=0, atol=2e-5)
        # As transformers itself loads it: nothing missing, nothing left over.
        _, report = AutoModelForImageTextToText.from_pretrained(output, output_loading_info=True)
        assert not any(report[name] for name in ("missing_keys", "unexpected_keys"))
        files = {path.name for path in output.iterdir()}
        assert {"README.md", "tokenizer.json", "processor_config.json"} <= files
        assert "2 steps" in (output / "README.md").read_text()
    exported = logprobs(load_policy(run / "policy"))
    torch.testing.assert_close(exported, live(run)["said"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_f13_a_separate_adapter_is_the_live_one(made, strategy, tmp_path, base):
    from peft import PeftModel

    run = made / strategy / "lora"
    given = str(run / "checkpoints" / "step_000001.ckpt")
    consolidate(composed(checkpoints=[given], output=str(tmp_path / "out"), adapter="separate"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
    policy = load_policy(base)
    policy.model.model = PeftModel.from_pretrained(policy.model.model, str(tmp_path / "out"))
    torch.testing.assert_close(logprobs(policy), live(run)["said"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_strategies_train_the_same_weights(made, kind):
    expected = live(made / "auto" / kind)["held"]
    for strategy in ("ddp", "fsdp2"):
        found = live(made / strategy / kind)["held"]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            # AdamW divides tiny gradients by their own size: rounding shows.
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_f21_sharded_runs_go_on_as_if_they_had_not_stopped(made, kind):
    expected = live(made / "fsdp2" / kind)["held"]
    found = live(made / "resumed" / kind)["held"]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_a_sharded_run_goes_on_from_the_file_of_another_strategy(made):
    expected = live(made / "ddp" / "lora")["held"]
    found = live(made / "from_file" / "lora")["held"]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)


def test_f21_checkpoints_hold_what_is_trained_alone_and_say_how_far_they_are(made):
    for strategy, form in (("auto", Form.FILE), ("ddp", Form.FILE), ("fsdp2", Form.PARTS)):
        path = made / strategy / "lora" / "checkpoints" / "step_000001.ckpt"
        assert form_of(path) is form
        assert read_progress(path)["epoch"] == 1
        assert all("lora_" in name for name in read_weights(path))


def test_f19_a_checkpoint_of_another_form_is_refused_with_the_way_out(made):
    from lightning.pytorch.strategies import DDPStrategy

    from reframe_vl.strategies import check_resumable

    with pytest.raises(ValueError, match="method=consolidate"):
        check_resumable(DDPStrategy(), made / "fsdp2" / "full" / "checkpoints/step_000001.ckpt")
