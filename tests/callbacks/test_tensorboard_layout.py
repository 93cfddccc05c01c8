"""The layout stands in the event file, and names curves that runs have."""

import re
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from reframe_vl.callbacks.tensorboard_layout import LAYOUT, TensorBoardLayout

ROOT = Path(__file__).parents[2]


def written(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    [event] = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout()
    layout.ParseFromString(event.tensor_proto.string_val[0])
    return layout


def trainer(folder):
    board = TensorBoardLogger(folder, name="", version="")
    return Trainer(logger=board, accelerator="cpu", enable_checkpointing=False)


def test_the_charts_are_in_the_event_file_in_their_order(tmp_path):
    training = trainer(tmp_path)
    callback = TensorBoardLayout()
    callback.on_train_start(training, LightningModule())
    training.logger.experiment.close()
    layout = written(tmp_path)
    assert [category.title for category in layout.category] == list(LAYOUT)
    first = layout.category[0].chart[0]
    assert first.title == "reward"
    assert list(first.multiline.tag) == ["^rollouts/reward$"]
    # As TensorBoard matches them: the parts of the reward are a chart of their own.
    assert re.match(first.multiline.tag[0], "rollouts/reward")
    assert not re.match(first.multiline.tag[0], "rollouts/reward/answer")


def test_a_layout_of_ones_own_takes_its_place(tmp_path):
    training = trainer(tmp_path)
    TensorBoardLayout({"mine": {"chart": ["a", "b"]}}).on_train_start(training, LightningModule())
    training.logger.experiment.close()
    [category] = written(tmp_path).category
    assert category.title == "mine"
    assert list(category.chart[0].multiline.tag) == ["^a$", "^b$"]


def test_no_logger_and_other_loggers_are_left_alone(tmp_path):
    for logger in (False, CSVLogger(tmp_path)):
        training = Trainer(logger=logger, accelerator="cpu", enable_checkpointing=False)
        TensorBoardLayout().on_train_start(training, LightningModule())
    assert not list(tmp_path.rglob("events.*"))
