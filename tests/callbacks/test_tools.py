import copy

from lightning.pytorch import LightningModule, Trainer

from reframe_vl.callbacks.evaluation import EvaluationCallback
from reframe_vl.callbacks.rollout import RolloutCallback
from reframe_vl.callbacks.rollout_log import RolloutLog
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.tools.base import StatefulTool
from reframe_vl.tools.crop_image import CropImage


class Counting(CropImage, StatefulTool):
    closed = 0

    def session(self, media):
        raise AssertionError("nothing is played")

    def close(self):
        self.closed += 1


def test_tools_are_ended_with_the_run_and_where_it_fails(tmp_path):
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    tools = [Counting(), Counting()]
    assert all(isinstance(tool, StatefulTool) for tool in tools)
    callbacks = [
        RolloutCallback(RolloutSettings(), HFEngine, [tools[0], CropImage()], 1, 2),
        EvaluationCallback(RolloutSettings(), [tools[1]], tmp_path / "curve.jsonl", 0, 1),
    ]
    for callback in callbacks:
        callback.on_exception(trainer, LightningModule(), KeyboardInterrupt())
        callback.teardown(trainer, LightningModule(), "fit")
    assert [tool.closed for tool in tools] == [2, 2]


def test_callbacks_of_a_run_can_be_copied(tmp_path):
    copied = copy.deepcopy(RolloutLog(tmp_path))
    assert copied.folder == tmp_path
