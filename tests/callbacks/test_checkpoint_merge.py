import json
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import Trainer

from checkpoint_folders import base_folder, merged, specialist, weights
from reframe_vl.algorithms.gdgrpo import GDGRPO
from reframe_vl.callbacks.checkpoint_merge import CheckpointMerge
from reframe_vl.callbacks.graceful_stop import GracefulStop
from reframe_vl.checkpoint.merge import MergeSettings
from reframe_vl.policy.loading import LoRASettings, load_policy
from reframe_vl.runs import register_resolvers

CONFIGS = Path(__file__).parents[2] / "configs"
register_resolvers()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    base = base_folder(root / "base", dtype=torch.bfloat16)
    return base, specialist(base, root / "other", 1)


def module_of(base, lora=None):
    policy = load_policy(base, dtype="bfloat16", lora=lora)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03)
    return GDGRPO(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1))


class FakeTrainer(Trainer):
    current_epoch, max_epochs, should_stop, is_global_zero = 0, 4, False, True
    callback_metrics = MappingProxyType({})

    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)


def play(callback, module, trainer, steps=4):
    for step in range(steps):
        trainer.current_epoch = step
        callback.on_train_epoch_end(trainer, module)
    return sorted(path.name for path in callback.folder.glob("*"))


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=4)])
def test_f18_the_policy_is_merged_with_others_and_stays_as_it_is(folders, lora, tmp_path):
    base, other = folders
    module = module_of(base, lora)
    before = {name: p.clone() for name, p in module.policy.named_parameters()}
    settings = MergeSettings("task_arithmetic", [0.5, 0.25])
    callback = CheckpointMerge([other], base, tmp_path / "merged", settings, every=2)
    assert play(callback, module, FakeTrainer()) == ["step_000001", "step_000003"]
    for name, parameter in module.policy.named_parameters():
        assert torch.equal(parameter, before[name]), name
    if lora is None:
        module.policy.model.save_pretrained(tmp_path / "policy")
    else:
        module.policy.model.save_pretrained(tmp_path / "adapter")
    own = tmp_path / ("policy" if lora is None else "adapter")
    expected = merged(
        (base, own, other), tmp_path / "out", method="task_arithmetic", weights=[0.5, 0.25]
    )
    found = weights(tmp_path / "merged" / "step_000003")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=2**-12)
    load_policy(tmp_path / "merged" / "step_000003")
    record = json.loads((tmp_path / "merged" / "step_000003" / "merge.json").read_text())
    assert record["checkpoints"] == ["this run's policy after step 3", str(other)]


def test_f03_without_others_the_policy_is_written_with_its_adapters_merged(folders, tmp_path):
    module = module_of(folders[0], LoRASettings(rank=4))
    callback = CheckpointMerge([], folders[0], tmp_path / "merged", MergeSettings())
    assert play(callback, module, FakeTrainer()) == ["step_000003"]
    again = load_policy(tmp_path / "merged" / "step_000003", dtype="bfloat16")
    module.policy.model.float()
    exact = module.policy.model.merge_and_unload().to(torch.bfloat16).state_dict()
    for name, tensor in again.model.model.state_dict().items():
        assert torch.equal(tensor, exact[name]), name


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=4)])
def test_what_was_trained_is_merged_before_it_is_rounded(folders, lora, tmp_path):
    base, _ = folders
    module = module_of(base, lora)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-6)
    settings = MergeSettings(dtype="float32")
    play(CheckpointMerge([], base, tmp_path / "merged", settings), module, FakeTrainer())
    found = weights(tmp_path / "merged" / "step_000003")
    module.policy.model.float()
    exact = module.policy.model if lora is None else module.policy.model.merge_and_unload()
    for name, tensor in exact.state_dict().items():
        assert torch.equal(tensor, found[name]), name


def test_an_early_end_is_merged_and_a_stop_by_a_signal_is_not(folders, tmp_path):
    module = module_of(folders[0])
    stop = GracefulStop()
    callback = CheckpointMerge([], folders[0], tmp_path / "merged", MergeSettings())
    trainer = FakeTrainer(stop)
    trainer.should_stop, trainer.max_epochs = True, 9
    stop.received = stop.signals[0]
    assert play(callback, module, trainer, 1) == []
    stop.received = None
    assert play(callback, module, trainer, 1) == ["step_000000"]


def test_what_cannot_be_merged_is_told_before_training(folders, tmp_path):
    base, other = folders

    def made(checkpoints, settings=None, every=0):
        return CheckpointMerge(checkpoints, base, tmp_path, settings or MergeSettings(), every)

    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        made([tmp_path])
    with pytest.raises(ValueError, match="one weight for each"):
        made([other], MergeSettings(weights=[1.0]))
    with pytest.raises(ValueError, match="or 0 for one at the end"):
        made([other], every=-1)


def test_it_joins_the_callbacks_of_an_experiment_by_its_group(tmp_path):
    added = ["+callbacks/checkpoint_merge=default", f"paths.run_dir={tmp_path}"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [*added, "callbacks.checkpoint_merge.settings.method=ties"])
    callback = instantiate(cfg.callbacks.checkpoint_merge)
    assert isinstance(callback, CheckpointMerge)
    assert callback.settings.method == "ties"
    assert callback.base == Path(cfg.model.path)
