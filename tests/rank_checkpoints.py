"""Trains a folder's model for some steps, alone or on several ranks, with checkpoints.

Run as a script it leaves a run directory: config.yaml, checkpoints/, policy/ and live.pt, what the
model in memory says and holds.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from one_step import Samples, fixed_groups
from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.callbacks.checkpoint import RunCheckpoint
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.policy.loading import LoRASettings, Policy, load_policy
from reframe_vl.policy.score import score
from reframe_vl.policy.sharding import gathered, whole
from reframe_vl.strategies import FSDP2
from tiny import sampling

STRATEGIES = {"auto": lambda: "auto", "ddp": lambda: "ddp", "fsdp2": FSDP2}


def logprobs(policy: Policy) -> torch.Tensor:
    groups = fixed_groups(policy.model, sampling())
    contexts = [c for g in groups for r in g.rollouts for c in r.contexts]
    with policy.model.inference():
        return score(policy.model, contexts, sampling()).logprobs_T


def run(
    folder: Path, base: Path, strategy: str, lora: bool, steps: int, resume: Path | None = None
) -> None:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.manual_seed(3)
    policy = load_policy(base, lora=LoRASettings(rank=4) if lora else None, freeze_vision=lora)
    optimizer = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.0)
    module = GDGRPO(GRPOSettings(), policy=policy, optimizer=optimizer)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=STRATEGIES[strategy](),
        max_epochs=steps,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RunCheckpoint(folder / "checkpoints", every=1, keep=None)],
    )
    groups = fixed_groups(policy.model, sampling())
    module.loader.generate = lambda: groups[trainer.global_rank :: trainer.world_size]
    trainer.fit(module, datamodule=Samples(), ckpt_path=resume, weights_only=False)
    export_policy(policy, folder / "policy", writes=trainer.is_global_zero)
    with whole(policy.model):
        said = logprobs(policy)
    held = {name: tensor.clone() for name, tensor in gathered(policy.model)}
    if trainer.is_global_zero:
        settings = {"_target_": "reframe_vl.policy.loading.load_policy", "path": str(base)}
        adapters = {"_target_": "reframe_vl.policy.loading.LoRASettings", "rank": 4}
        settings |= {"lora": adapters, "freeze_vision": True} if lora else {"lora": None}
        OmegaConf.save({"model": settings}, folder / "config.yaml")
        torch.save({"said": said, "held": held}, folder / "live.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--jobs", nargs="+", required=True, help="FOLDER:full|lora:STEPS[:CKPT]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for job in args.jobs:
        folder, kind, steps, *resume = job.split(":")
        found = Path(resume[0]) if resume else None
        run(Path(folder), args.base, args.strategy, kind == "lora", int(steps), found)
