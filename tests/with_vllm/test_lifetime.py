"""What is left when a trainer is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_models import descendants

TRAINER = """
import sys, time
import torch
from pathlib import Path
from reframe_vl.policy.loading import load_policy
from reframe_vl.rollout.collector import EventLoopThread
from reframe_vl.rollout.vllm_engine import VLLMEngine
from vllm_models import ARGUMENTS

if __name__ == "__main__":
    checkpoint, weights, launch = sys.argv[1:]
    model = load_policy(checkpoint).model
    engine = VLLMEngine(
        model, arguments=ARGUMENTS, weights_folder=weights, launch=launch == "launch"
    )
    loop = EventLoopThread()
    loop.run(engine.start(torch.device("cpu")))
    loop.run(engine.sync(model, 0))
    Path(weights, "ready").touch()
    time.sleep(1000)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


# A colocated engine that is starting waits five minutes for its trainer, with nothing loaded yet.
@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "when"), [("colocated", "started"), ("launch", "started"), ("launch", "starting")]
)
def test_a_killed_trainer_leaves_no_process_and_no_weights(where, when, checkpoint, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    weights = tmp_path / "weights"
    weights.mkdir()
    path = os.pathsep.join(sys.path)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(checkpoint), str(weights), where],
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        if when == "started":
            wait_until(lambda: (weights / "ready").exists() or trainer.poll() is not None, 1500)
        else:
            wait_until(lambda: descendants(trainer.pid) or trainer.poll() is not None, 1500)
            time.sleep(1)
        assert trainer.poll() is None
        engine = descendants(trainer.pid)
        assert engine
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        wait_until(lambda: not any(map(alive, engine)), 300)
        if when == "started":
            assert [entry.name for entry in weights.iterdir()] == ["ready"]
    finally:
        trainer.kill()
        trainer.wait()
