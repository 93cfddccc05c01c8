"""This project's side of a comparison: collector, transformers engine, GRPO module, Lightning."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from exchange import MODEL, Stopwatch, Work, reward, serve
from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.gdgrpo import GDGRPO, GRPOSettings
from reframe_vl.callbacks.rollout import RolloutCallback
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.policy.loading import Policy, load_policy
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.types import (
    RGB,
    Answer,
    Box,
    Context,
    ImageMedia,
    Modality,
    Rollout,
    Sample,
    Sampling,
)


@dataclass(frozen=True)
class Picture(ImageMedia):
    """An image in memory."""

    pixels: RGB
    name: str

    @property
    def key(self) -> str:
        return self.name

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[0]

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        return self.pixels


@dataclass(frozen=True)
class Prompts:
    """The prompts as samples."""

    work: Work

    def __len__(self) -> int:
        return len(self.work.questions)

    def __getitem__(self, index: int) -> Sample:
        picture = Picture(self.work.images[index], str(index))
        question = str(self.work.questions[index])
        return Sample(str(index), Modality.IMAGE, picture, question, Answer("open", ""))


@dataclass(frozen=True)
class FixedLength(RolloutSettings):
    """Turns that never end by themselves."""

    banned_ids: tuple[int, ...] = ()

    def sampling(self, policy: Policy) -> Sampling:
        return replace(super().sampling(policy), banned_ids=self.banned_ids, stop_ids=())


class GivenEngine:
    """Gives each session its rollout."""

    def __init__(self, completions: Any) -> None:
        self.left = [tuple(map(int, row)) for row in completions]

    def open(self, sessions: Any) -> None:
        pass

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        ids = self.left.pop(0)
        return Generation(ids, (None,) * len(ids), "length")

    def release(self, session: str) -> None:
        pass

    def close(self) -> None:
        pass


class Watch(Callback):
    """Tells the stopwatch where the step is."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.gradients: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stopwatch.begin()

    # The loader has generated before it gives the step's first batch.
    def on_train_batch_start(self, *args: Any) -> None:
        self.stopwatch.rollouts_are_there()

    def on_train_batch_end(self, *args: Any) -> None:
        self.stopwatch.end()


class KeepGradients(Watch):
    """Also keeps the step's gradients, before they are clipped."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        parameters = pl_module.policy.model.named_parameters()
        self.gradients = {n: p.grad.numpy().copy() for n, p in parameters if p.grad is not None}


def train(folder: Path, work: Work, stopwatch: Stopwatch) -> dict[str, Any]:
    """Takes a step on each prompt."""
    given = len(work.completions) > 0
    module = GDGRPO(
        GRPOSettings(subgroups=False),
        policy=load_policy(folder / MODEL),
        optimizer=partial(torch.optim.AdamW, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rollouts = RolloutCallback(
        FixedLength(
            PromptSettings(show_tools=False),
            Budget(max_turns=1, max_context_tokens=10**6, max_visual_tokens=10**6),
            max_new_tokens=work.num_tokens,
            banned_ids=tuple(map(int, work.banned_ids)),
        ),
        engine=(lambda model, precision: GivenEngine(work.completions)) if given else HFEngine,
        tools=[],
        prompts_per_step=1,
        rollouts_per_prompt=work.num_rollouts,
    )
    rollouts.score = partial(_score, work)
    watch = (KeepGradients if given else Watch)(stopwatch)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=len(work.questions),
        gradient_clip_val=1.0,
        precision="32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[rollouts, watch],
    )
    trainer.fit(module, datamodule=SampleDataModule(Prompts(work)))
    contexts = module.loader.groups[0].rollouts[0].contexts
    prompt = module.policy.expand(Context(contexts[0].spans[:1]))
    return {"gradients": watch.gradients, "prompt_ids": prompt.token_ids.tolist()}


def _score(work: Work, rollout: Rollout, sample: Sample, progress: float) -> None:
    ids = rollout.contexts[0].spans[-1].token_ids
    if len(ids) != work.num_tokens:
        raise RuntimeError(f"A rollout has {len(ids)} tokens, not {work.num_tokens}.")
    given = len(work.completions) > 0
    rollout.reward = float(work.rewards[rollout.key.index]) if given else reward(ids)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec")
    serve(train)
