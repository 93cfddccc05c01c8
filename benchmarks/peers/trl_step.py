"""TRL's side of a comparison: its own GRPOTrainer, trained by its own loop.

Runs in the environment that ``make trl-env`` makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from exchange import MODEL, Stopwatch, Work, reward, serve
from torchvision_operators import import_torchvision

KEPT = import_torchvision()

import trl.trainer.utils  # noqa: E402
from datasets import Dataset, Features, Image, Value  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Watched(GRPOTrainer):
    """The trainer, with a stopwatch after its rollouts; given rollouts replace sampled ones."""

    work: Work
    stopwatch: Stopwatch
    prompt_ids: list[int]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.prompt_ids = list(prompt_ids[0])
        if not len(self.work.completions):
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return self.work.completions.tolist(), None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        if batch["completion_ids"].shape != (self.work.num_rollouts, self.work.num_tokens):
            raise RuntimeError(f"Rollouts have the shape {tuple(batch['completion_ids'].shape)}.")
        if "old_per_token_logps" in batch:
            raise RuntimeError("TRL recomputed old log-probs: it was to be spared that.")
        if len(self.work.completions):
            batch["advantages"] = torch.from_numpy(self.work.advantages).float()
        self.stopwatch.rollouts_are_there()
        return batch


class Watch(TrainerCallback):
    """Tells the stopwatch where the step is, and keeps what there is to compare."""

    def __init__(self, stopwatch: Stopwatch, keep: bool) -> None:
        self.stopwatch, self.keep = stopwatch, keep
        self.gradients: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopwatch.begin()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if self.keep:
            parameters = model.named_parameters()
            self.gradients = {n: p.grad.numpy().copy() for n, p in parameters if p.grad is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopwatch.end()


def rewards(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Of each rollout."""
    return [reward(ids) for ids in completion_ids]


def train(folder: Path, work: Work, stopwatch: Stopwatch) -> dict[str, Any]:
    """Takes a step on each prompt."""
    given = len(work.completions) > 0
    path = folder / MODEL
    # Only where Triton runs does TRL leave prompt tokens out of the language-model head. It does
    # so here too, with its kernels for processors.
    trl.trainer.utils._use_triton = lambda device: True
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=work.num_rollouts,
        gradient_accumulation_steps=1,
        num_generations=work.num_rollouts,
        max_completion_length=work.num_tokens,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        generation_kwargs={
            # None where nothing is banned: an empty list is refused.
            "suppress_tokens": work.banned_ids.tolist() or None,
            "min_new_tokens": work.num_tokens,
        },
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        # Clipping would change the gradients that are compared.
        max_grad_norm=0.0 if given else 1.0,
        max_steps=len(work.questions),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch(stopwatch, given)
    trainer = Watched(
        model=AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32),
        reward_funcs=rewards,
        args=settings,
        train_dataset=_dataset(work),
        processing_class=AutoProcessor.from_pretrained(path),
        callbacks=[watch],
    )
    trainer.work, trainer.stopwatch = work, stopwatch
    trainer.train()
    return {"gradients": watch.gradients, "prompt_ids": trainer.prompt_ids}


def _dataset(work: Work) -> Dataset:
    """A conversation and an image a row."""
    from PIL import Image as Pillow

    rows = [
        {"prompt": [{"role": "user", "content": str(question)}], "image": Pillow.fromarray(pixels)}
        for question, pixels in zip(work.questions, work.images, strict=True)
    ]
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_list(rows, features=Features({"prompt": [message], "image": Image()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(train)
