"""What every algorithm's LightningModule shares: the policy, its optimiser, ranks and metrics."""

from __future__ import annotations

import atexit
import copy
import gc
import logging
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from reframe_vl.algorithms.batching import ALONE, Ranks
from reframe_vl.algorithms.losses import locate_outliers
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.policy.loading import Policy
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import predictive_states, token_scores
from reframe_vl.policy.sharding import shard, whole
from reframe_vl.rollout.loader import RolloutLoader, Sealed
from reframe_vl.types import MicroBatch, RolloutGroup, Sampling, TrainItem

logger = logging.getLogger(__name__)
Number = TypeVar("Number", float, Tensor)


class PolicyModule(LightningModule, ABC):
    """Holds a policy and trains it with automatic optimisation.

    Args:
        policy: The loaded policy.
        optimizer: Makes the optimiser from parameters.
        scheduler: Makes a learning-rate scheduler from the optimiser, stepped once an update.
        max_forward_tokens: Bound of one forward in ``policy.score``.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        max_forward_tokens: int = 16384,
    ) -> None:
        """Takes the policy over."""
        super().__init__()
        policy.model.widen_trained()
        self.policy = policy.model
        self.components = policy
        self.max_forward_tokens = max_forward_tokens
        self.engine_is_trainer = True
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self.loader = RolloutLoader(num_batches=0)
        self._metrics: dict[str, Tensor] = {}
        self._values: dict[str, float] = {}
        self._reference: VisionLanguageModel | None = None

    # ------------------------------------------------------------------ what an algorithm gives

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """U, optimiser updates of one step's rollouts."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the initial policy is kept."""

    @property
    def min_rollouts(self) -> int:
        """The smallest group that teaches something: by default one with a baseline."""
        return 2

    def check_start(self, data: SampleDataModule) -> None:
        """Looks at what else the algorithm takes, before the run's directory is taken."""

    @abstractmethod
    def prepare(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """Turns scored groups into U times K micro-batches."""

    # ------------------------------------------------------------------ steps

    @property
    def step(self) -> int:
        """The reinforcement-learning step: an epoch of the rollout loader."""
        return self.trainer.current_epoch

    def importance(self, wanted: str) -> Any:
        """Resolves ``auto``: nothing to correct where the sampler is the policy itself."""
        if wanted != "auto":
            return wanted
        return "none" if self.engine_is_trainer else "truncated"

    def train_dataloader(self) -> RolloutLoader:
        """Generates with the current policy; the rollout callback connects the engine."""
        self.loader.num_batches = self.num_updates * self.trainer.accumulate_grad_batches
        self.loader.prepare = self.prepare
        return self.loader

    def on_before_batch_transfer(self, batch: Sealed, dataloader_idx: int) -> MicroBatch:
        """Opens what the loader has sealed."""
        return batch.batch

    def configure_optimizers(self) -> Any:
        """Optimises what is trainable."""
        optimizer = self._make_optimizer([p for p in self.parameters() if p.requires_grad])
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def flat(self, items: Sequence[TrainItem], name: str) -> Shaped[Tensor, "T"]:
        """A field of all items, one value a trained token, on the policy's device."""
        return torch.from_numpy(np.concatenate([getattr(i, name) for i in items])).to(self.device)

    def zero_loss(self) -> Tensor:
        """A loss of nothing that still takes every parameter through backward."""
        if self.policy.lockstep is not None:
            # Parameters that are gathered for a forward get their gradients through one alone.
            states = predictive_states(self.policy, [])
            logprobs_T, _ = token_scores(self.policy, states.hidden_T, states.targets_T, Sampling())
            return logprobs_T.sum()
        return sum((p.flatten()[:1].sum() * 0.0 for p in self._trainable()), torch.zeros(()))

    def touch_all_parameters(self, loss: Tensor) -> Tensor:
        """On several ranks every parameter must get a gradient on every one of them."""
        if self.trainer.world_size == 1 or self.policy.lockstep is not None:
            return loss
        return loss + self.zero_loss()

    def scaled(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        """What ``training_step`` gives back, so that the accumulated gradient is the step's.

        Lightning divides by K and strategies average over ranks; a micro-batch's weights already
        hold the global normaliser. DeepSpeed accumulates by itself, and divides by K once more.

        Raises:
            FloatingPointError: The loss is no number: an update with it would destroy the policy.
        """
        if not bool(loss.detach().isfinite()):
            raise FloatingPointError(
                f"The loss of step {batch.step} is {loss.item()}, so training ends before this "
                "update; checkpoints written before are sound. Look for NaN in the policy's "
                "weights and for metrics that grew before (train/…), and lower lr or raise the "
                "precision."
            )
        divided = 2 if self.trainer.strategy.handles_gradient_accumulation else 1
        scale = batch.num_micro**divided * self.trainer.world_size
        return self.touch_all_parameters(loss) * scale

    def _trainable(self) -> Iterator[Tensor]:
        return (p for p in self.policy.parameters() if p.requires_grad)

    # ------------------------------------------------------------------ ranks

    @property
    def ranks(self) -> Ranks:
        """The ranks that share a step."""
        if self.trainer.world_size == 1:
            return ALONE
        return Ranks(self.trainer.global_rank, _of_all_ranks)

    # ------------------------------------------------------------------ reference policy

    def configure_model(self) -> None:
        """Spreads the parameters over the ranks, where the strategy is to.

        The initial policy, if it is kept, is spread too.
        """
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            mixed = {"bf16-mixed": torch.bfloat16}.get(str(self.trainer.precision))
            for model in (self.policy, self._reference):
                if model is not None and model.lockstep is None:
                    shard(model, strategy.device_mesh["data_parallel"], mixed)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Inference under the trainer's own precision: loaders run outside of it.

        All ranks enter it together; what each of them scores is its own.
        """
        with (
            whole(self.policy),
            self.policy.inference(),
            self.trainer.precision_plugin.forward_context(),
        ):
            yield

    def setup(self, stage: str) -> None:
        """Keeps a copy of the initial policy where the loss needs it."""
        if self.trainer.world_size > 1:
            # Gloo's threads were seen to end a process that was done by SIGABRT; of NCCL's group
            # Lightning takes care itself.
            atexit.register(_leave_ranks)
        adapters = hasattr(self.policy.model, "disable_adapter")
        if stage == "fit" and self.needs_reference and not adapters and self._reference is None:
            reference = copy.deepcopy(self.policy).requires_grad_(False).eval()
            reference.narrow()
            # Not a submodule: it belongs neither to checkpoints nor to the optimiser.
            object.__setattr__(self, "_reference", reference)

    @contextmanager
    def reference_policy(self) -> Iterator[VisionLanguageModel]:
        """The initial policy: the base without its adapters, or the copy kept at the start."""
        if self._reference is None:
            with self.policy.model.disable_adapter():  # type: ignore[operator]
                yield self.policy
        else:
            reference = self._reference.to(self.device)
            with whole(reference):
                yield reference

    # ------------------------------------------------------------------ metrics

    def report_outliers(
        self,
        batch: MicroBatch,
        logprobs_T: Float[Tensor, "T"],
        sampler_T: Float[Tensor, "T"],
        threshold: float = 1.0,
        most: int = 3,
    ) -> None:
        """Names the tokens on which engine and trainer disagree: a mean would hide a single one."""
        outliers = locate_outliers(logprobs_T, sampler_T, threshold).tolist()
        if not outliers:
            return
        tokens = [
            t for item in batch.items for s in item.context.spans if s.trained for t in s.token_ids
        ]
        shown = ", ".join(
            f"token {tokens[i]} at {i}: {logprobs_T[i].item():.3f} and {sampler_T[i].item():.3f}"
            for i in outliers[:most]
        )
        logger.warning(
            "Step %d: engine and trainer disagree on %d of %d log-probs by more than %g: %s",
            batch.step,
            len(outliers),
            len(tokens),
            threshold,
            shown,
        )

    def gather_metrics(self, metrics: dict[str, Tensor]) -> None:
        """Adds a micro-batch's sums and counts to the step's; ``*_max`` by their maximum."""
        for name, value in metrics.items():
            value, known = value.detach().double(), self._metrics.get(name)
            if known is None:
                self._metrics[name] = value
            elif name.endswith("_max"):
                self._metrics[name] = torch.maximum(known, value)
            elif not name.endswith("_argmax"):
                self._metrics[name] = known + value

    def on_train_epoch_end(self) -> None:
        """Logs the step's metrics as means over its tokens."""
        metrics, self._metrics = self._metrics, {}
        if self.trainer.world_size > 1:
            metrics = over_ranks(metrics, sum)
        counts = {n: value for n, value in metrics.items() if n.endswith("tokens")}
        means = dict(counts)
        for name, value in metrics.items():
            base = name.removesuffix("_sum")
            if name in counts or name.endswith("_argmax"):
                continue
            if name.endswith("_max"):
                means[base] = value
            elif base == "loss":
                # Each update's loss is a mean already.
                means[base] = value / self.num_updates
            else:
                # "kl_gap" is a mean over "kl_tokens" and "image/kl" one over "image/tokens".
                of = max((n for n in counts if name.startswith(n[:-6])), key=len, default="")
                means[base] = value / counts.get(of, torch.ones(())).clamp(min=1)
        self.log_step({f"train/{name}": float(value) for name, value in means.items()})
        self._publish()

    def log_step(self, values: Mapping[str, float]) -> None:
        """Adds numbers of the step to what is logged at its end.

        ``self.log`` takes a millisecond a number, and a communication of its own on several ranks.
        """
        self._values |= values

    def _publish(self) -> None:
        """Gives the step's numbers to the loggers, and to callbacks that monitor one."""
        values, self._values = self._values, {}
        if self.trainer.world_size > 1:
            values = over_ranks(values, statistics.fmean)
        # The horizontal axis is the step: optimiser updates would stretch it where U > 1.
        for board in self.trainer.loggers:
            board.log_metrics(values, self.step)
            board.save()
        self.trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in values.items()}
        )

    # The base is loaded from its folder and an adapter's frozen base never changes.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps only what is trained."""
        # A tied head has a name of its own among the tensors.
        every = self.policy.named_parameters(remove_duplicate=False)
        frozen = {f"policy.{name}" for name, p in every if not p.requires_grad}
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if k not in frozen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts the frozen parameters back, and checks that the trained ones are the same.

        Raises:
            ValueError: The checkpoint trains other parameters than this run.
        """
        if "state_dict" not in checkpoint:
            # A strategy that keeps parts of the weights has checked and loaded them itself.
            return
        self.check_trained(set(checkpoint["state_dict"]))
        checkpoint["state_dict"] = self.state_dict() | checkpoint["state_dict"]

    def check_trained(self, held: set[str]) -> None:
        """Checks that a checkpoint with these parameters is of this run's.

        Raises:
            ValueError: It trains others.
        """
        trained = {f"policy.{n}" for n, p in self.policy.named_parameters() if p.requires_grad}
        if missing := sorted(trained - held):
            raise ValueError(
                f"The checkpoint lacks {len(missing)} parameters that this run trains (first: "
                f"{missing[0]}): resume with the LoRA and freezing settings it was made with."
            )
        if unknown := sorted(held - set(self.state_dict())):
            raise ValueError(
                f"The checkpoint holds {len(unknown)} parameters that this model lacks (first: "
                f"{unknown[0]}): resume with the model it was made from."
            )


def _leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # Its threads end with the last who hold it, and these hold each other.
        gc.collect()


def _of_all_ranks(own: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def over_ranks(
    values: Mapping[str, Number], combine: Callable[[list[Number]], Any]
) -> dict[str, Number]:
    """Combines the numbers of the ranks that have one; of names in ``_max`` the largest is taken.

    What is no number is larger than any: it must not be hidden. Refusals of a kind that a rank had
    none of are 0 there.
    """
    ranks: list[Mapping[str, Number]] = _of_all_ranks(dict(values))
    result: dict[str, Number] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        counted = "/refused/" in name
        found: list[Any] = [rank.get(name, 0.0) for rank in ranks if name in rank or counted]
        largest = max(found, key=lambda value: (math.isnan(value), float(value)))
        result[name] = largest if name.endswith("_max") else combine(found)
    return result
