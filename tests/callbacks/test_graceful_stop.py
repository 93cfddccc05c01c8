import os
import signal

import pytest
from lightning.pytorch import LightningModule, Trainer

from reframe_vl.callbacks.graceful_stop import GracefulStop


@pytest.fixture
def trainer():
    return Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_g14_a_signal_sets_a_flag_and_training_ends_after_the_step(trainer, name):
    stop, module = GracefulStop(), LightningModule()
    number = signal.Signals[name]
    before = signal.getsignal(number)
    stop.setup(trainer, module, "fit")
    # Lightning's handlers come after setup; they would save, or end the process.
    signal.signal(number, lambda *_: pytest.fail("another handler was called"))
    stop.on_train_start(trainer, module)
    try:
        os.kill(os.getpid(), number)
        assert stop.received is number
        assert not trainer.should_stop
        stop.on_train_epoch_end(trainer, module)
        assert trainer.should_stop
    finally:
        stop.teardown(trainer, module, "fit")
    assert signal.getsignal(number) == before


def test_signals_that_a_cluster_repeats_change_nothing(trainer):
    stop, module = GracefulStop(), LightningModule()
    stop.setup(trainer, module, "fit")
    try:
        for name in ("SIGUSR1", "SIGTERM", "SIGTERM", "SIGUSR1"):
            os.kill(os.getpid(), signal.Signals[name])
        assert stop.received is signal.SIGUSR1
    finally:
        stop.teardown(trainer, module, "fit")


def test_evaluation_leaves_signals_alone(trainer):
    before = signal.getsignal(signal.SIGUSR1)
    GracefulStop().setup(trainer, LightningModule(), "validate")
    assert signal.getsignal(signal.SIGUSR1) == before
