"""Two ranks have the gradient of one process, whatever each of them has to score."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from one_step import assert_same
from rank_cases import CASES, HALF_CASES, step

TESTS = Path(__file__).parents[1]
# Processes that wait for each other take long where cores are few.
pytestmark = pytest.mark.timeout(1200)

DDP_CASES = ["no images for the second", "two updates and a reference", "selection", "clipped"]
"""Others of DDP are in tests/algorithms."""

ZERO_CASES = [(f"deepspeed_zero{stage}", name) for stage in (2, 3) for name in CASES]


def on_two_ranks(strategy: str, names: list[str], out: Path) -> dict[str, dict[str, Any]]:
    paths = (TESTS, TESTS.parent / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(TESTS / "rank_cases.py"), f"--strategy={strategy}", f"--out={out}"]
    done = subprocess.run(
        [*command, "--cases", *names],
        env=environment,
        capture_output=True,
        text=True,
        # One that hangs would wait for half an hour.
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def alone():
    return {name: step(case) for name, case in (CASES | HALF_CASES).items()}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    names = [*CASES, *HALF_CASES]
    return on_two_ranks("fsdp2", names, tmp_path_factory.mktemp("fsdp2") / "found.pt")


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return on_two_ranks("ddp", DDP_CASES, tmp_path_factory.mktemp("ddp") / "found.pt")


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory):
    """By DeepSpeed, of each stage."""
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    folder = tmp_path_factory.mktemp("zero")
    return {
        stage: on_two_ranks(stage, [name for at, name in ZERO_CASES if at == stage], folder / stage)
        for stage in ("deepspeed_zero2", "deepspeed_zero3")
    }


@pytest.mark.parametrize("name", CASES)
def test_c05_g08_sharded_ranks_have_the_gradient_of_one_process(alone, sharded, name):
    assert_same(sharded[name]["gradients"], alone[name]["gradients"], 1e-5)


@pytest.mark.parametrize("name", HALF_CASES)
def test_g08_in_half_precision_the_gradient_is_single_and_that_of_one_process(alone, sharded, name):
    exact = step(replace(HALF_CASES[name], half=False))["gradients"]
    for found in (alone[name], sharded[name]):
        assert found["gradients"].keys() == exact.keys()
        assert {g.dtype for g in found["gradients"].values()} == {torch.float32}
        error = [(g - exact[key]).norm() for key, g in found["gradients"].items()]
        size = torch.stack([g.norm() for g in exact.values()]).norm()
        # A product in bfloat16 has a relative error of 0.4 %.
        assert torch.stack(error).norm() < 0.1 * size


@pytest.mark.parametrize("name", DDP_CASES)
def test_c05_ddp_ranks_have_the_gradient_of_one_process(alone, replicated, name):
    assert_same(replicated[name]["gradients"], alone[name]["gradients"], 1e-5)


@pytest.mark.parametrize(("stage", "name"), ZERO_CASES)
def test_c05_g08_deepspeeds_ranks_have_the_weights_of_one_process(alone, partitioned, stage, name):
    # It keeps the gradients to itself; the update is SGD's.
    found, expected = partitioned[stage][name]["weights"], alone[name]["weights"]
    assert found.keys() == expected.keys()
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=0, atol=1e-5)


def test_clipping_is_at_work(alone):
    norm = torch.stack([g.norm() for g in alone["clipped"]["gradients"].values()]).norm()
    assert float(norm) == pytest.approx(CASES["clipped"].clip, rel=1e-4)
