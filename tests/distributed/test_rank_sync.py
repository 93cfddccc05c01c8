"""Engines of ranks that hold a part of every parameter get the whole weights, tensor by tensor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rank_sync import SHARD_BYTES
from reframe_vl.checkpoint.reading import read_weights

TESTS = Path(__file__).parents[1]
# Processes that wait for each other take long where cores are few.
pytestmark = pytest.mark.timeout(1200)
JOBS = {"full": "own", "full_shared": "shared", "lora": "own", "lora_shared": "shared"}


@pytest.fixture(scope="module")
def runs(random_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("sync")
    jobs = [f"{root / name}:{name.split('_')[0]}:{whose}" for name, whose in JOBS.items()]
    for name in JOBS:
        (root / name).mkdir()
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(TESTS / "rank_sync.py"), f"--model={random_model}", "--jobs", *jobs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "rollouts are of another policy" not in done.stderr
    return root


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", JOBS)
def test_d16_f20_every_ranks_engine_has_the_weights_of_the_last_update(runs, name, rank):
    first, second = (torch.load(runs / name / f"rank_{rank}_version_{v}.pt") for v in (0, 1))
    trained = read_weights(runs / name / "run" / "checkpoints" / "step_000000.ckpt")
    assert trained and set(trained) <= set(second)
    for tensor, value in trained.items():
        torch.testing.assert_close(second[tensor], value, rtol=0, atol=0)
    assert any(not torch.equal(first[tensor], second[tensor]) for tensor in trained)


@pytest.mark.parametrize("name", JOBS)
def test_weights_are_handed_over_without_a_second_copy_of_the_model(runs, name):
    written = sorted((runs / name).rglob("sizes.json"))
    assert len(written) == 2 * (1 if JOBS[name] == "shared" else 2)
    for sizes in map(json.loads, (path.read_text() for path in written)):
        if name.startswith("lora"):
            continue
        # One is gathered while the one before it is still at hand.
        assert sizes["most"] <= SHARD_BYTES + 2 * sizes["largest"] < sizes["all"] / 2
