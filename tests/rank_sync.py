"""Trains two steps with an engine whose weights are its own, and keeps what it is given.

Run as a script under torch.distributed.run: a folder each job, FOLDER:full|lora:own|shared.
"""

import argparse
import copy
import json
import os
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from reframe_vl.policy import sharding
from reframe_vl.rollout import vllm_engine, vllm_weights
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train

CONFIGS = Path(__file__).parents[1] / "configs"
SHARD_BYTES = 100_000
"""Of a file in which weights are handed over."""


class Gathered:
    """Counts the bytes of gathered tensors that are in memory at the same time."""

    def __init__(self):
        self.live, self.sizes, self.most = [], [], 0
        self._full = sharding.full

    def full(self, tensor):
        result = self._full(tensor)
        # What a rank holds whole already is no copy.
        if isinstance(tensor.detach(), DTensor):
            self.live = [(ref, size) for ref, size in self.live if not ref.expired()]
            self.live.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            self.sizes.append(result.nbytes)
            self.most = max(self.most, sum(size for _, size in self.live))
        return result


class KeepingEngine:
    """Stands for vLLM: takes weights from the files that vLLM would read."""

    folder, is_shared = Path(), False

    def __init__(self, model, **settings):
        self.model, self.loaded, self.served = copy.deepcopy(model), None, ""

    @property
    def shared(self):
        return self.is_shared

    async def start(self, device):
        pass

    async def sync(self, model, version):
        counted = Gathered()
        sharding.full = counted.full
        folder = self.pushed / f"version_{version}"
        if vllm_weights.has_adapter(model):
            vllm_weights.write_adapter(model, folder)
        else:
            vllm_weights.write_weights(model, folder, SHARD_BYTES)
        sharding.full = counted._full
        sizes = {"most": counted.most, "all": sum(counted.sizes), "largest": max(counted.sizes)}
        (folder / "sizes.json").write_text(json.dumps(sizes))
        self.served = str(folder)

    async def follow(self, served):
        self.served = served

    @property
    def pushed(self):
        return self.folder / ("all" if self.shared else f"rank_{os.environ['RANK']}")

    def load(self):
        latest = Path(self.served)
        if latest == self.loaded:
            return
        tensors = {
            n: t for file in latest.rglob("*.safetensors") for n, t in load_file(file).items()
        }
        if vllm_weights.has_adapter(self.model):
            set_peft_model_state_dict(self.model.model, tensors)
        else:
            report = self.model.base.load_state_dict(tensors, strict=False)
            assert not report.unexpected_keys
        self.loaded = latest
        name = f"rank_{os.environ['RANK']}_{latest.name}.pt"
        torch.save(self.model.state_dict(), self.folder / name)

    async def rest(self):
        pass

    def open(self, sessions):
        pass

    async def generate(self, session, context, sampling, seed):
        self.load()
        engine = HFEngine(self.model)
        engine.open([session])
        return await engine.generate(session, context, sampling, seed)

    def release(self, session):
        pass

    def close(self):
        pass


def run(folder: Path, model: str, lora: bool, shared: bool) -> None:
    KeepingEngine.folder, KeepingEngine.is_shared = folder, shared
    overrides = [
        f"paths.run_dir={folder / 'run'}",
        f"model.path={model}",
        "run_name=run",
        "rollout=vllm",
        "trainer.devices=2",
        "strategy=fsdp2",
        "num_threads=1",
        "prompts_per_step=2",
        "rollouts_per_prompt=4",
        "steps=2",
        "lr=0.01",
        "warmup_updates=0",
        # Whatever the rewards are, an update changes weights.
        "algorithm.optimizer.weight_decay=0.1",
        "evaluate=false",
        "evaluation.every=0",
        "callbacks.checkpoint.every=1",
        "callbacks.checkpoint.keep=null",
        "callbacks.rollout_log.pictures_every=0",
    ]
    if lora:
        overrides += ["model.lora={_target_:reframe_vl.policy.loading.LoRASettings,rank:4}"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        train(compose("train", overrides))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", nargs="+", required=True)
    args = parser.parse_args()
    register_resolvers()
    vllm_engine.VLLMEngine = KeepingEngine
    for job in args.jobs:
        folder, kind, whose = job.split(":")
        run(Path(folder), args.model, kind == "lora", whose == "shared")
