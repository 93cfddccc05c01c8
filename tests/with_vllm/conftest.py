"""Tests with a real vLLM: engines start once and are shared, since each takes half a minute."""

import importlib.util

import pytest

from reframe_vl.policy.loading import load_policy
from reframe_vl.rollout.collector import EventLoopThread
from reframe_vl.rollout.vllm_engine import VLLMEngine
from vllm_models import ARGUMENTS, CPU, write_checkpoint

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if "with_vllm" in item.path.parts:
            # Each engine loads torch and vLLM anew, in a process of its own.
            item.add_marker(pytest.mark.timeout(1800))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@pytest.fixture(scope="session")
def loop():
    thread = EventLoopThread()
    yield thread
    thread.cancel()
    thread.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of the tiny checkpoint, whose head is not tied."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def make_engine(loop):
    """Makes engines that are ended with the session."""
    engines = []

    def make(model, **settings):
        arguments = ARGUMENTS | settings.pop("arguments", {})
        engine = VLLMEngine(model, arguments=arguments, **settings)
        engines.append(engine)
        loop.run(engine.start(CPU))
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def colocated(checkpoint, make_engine):
    """An engine beside the trainer, with the weights it has loaded itself."""
    return make_engine(load_policy(checkpoint).model)
