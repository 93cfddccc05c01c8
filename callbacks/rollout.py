"""Generates each step's rollouts: starts the engine, collects groups, scores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.data.media import MediaError
from reframe_vl.policy.sharding import check_gatherable, whole
from reframe_vl.policy.views import ViewError
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.drop import DropMode
from reframe_vl.rollout.engine import Engine, SyncedEngine
from reframe_vl.rollout.gate import Gate
from reframe_vl.rollout.prompt import prompt_tokens
from reframe_vl.rollout.settings import RolloutSettings, make_environment
from reframe_vl.schedules import Constant
from reframe_vl.tools.base import Tool, close_tools
from reframe_vl.types import Rollout, RolloutGroup, Sample, Sampling

Scorer = Callable[[Rollout, Sample, float], None]


@dataclass(frozen=True)
class _Wave:
    """A step's rollouts, which may still be under way.

    Attributes:
        progress: Of the step.
        groups: Waits for them.
    """

    plan: Plan
    progress: float
    groups: Callable[[], list[RolloutGroup]]


class RolloutCallback(Callback):
    """Connects an engine to the loader, from ``setup`` to ``teardown`` or a failure.

    Args:
        settings: How rollouts are played.
        engine: Makes the engine from the policy's model.
        tools: What the policy can call.
        prompts_per_step: P, samples of a step over all ranks.
        rollouts_per_prompt: G.
        seed: Of the run.
        overlap: Generate the next step's rollouts while this step trains, with the weights of its
            beginning: they are one step behind.

    Attributes:
        drop_probability: Of progress; set by the ground-drop callback.
        drop_mode: Likewise.
        score: Sets a rollout's rewards; set by the reward callback.
        gate: Of progress; set by the gate callback, None without a gate.
        extend: Adds others' rollouts to the groups; set by the auxiliary callback.
        before_generation: Called while no rollout is under way; set by the weight-sync callback.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        engine: Callable[..., Engine],
        tools: Sequence[Tool],
        prompts_per_step: int,
        rollouts_per_prompt: int,
        seed: int = 0,
        overlap: bool = False,
    ) -> None:
        """Checks what can be checked without a policy.

        Raises:
            ValueError: No rollouts at all; or greedy rollouts, whose groups would be all alike.
        """
        if rollouts_per_prompt < 1:
            raise ValueError(
                f"rollouts_per_prompt is {rollouts_per_prompt}: it must be at least 1."
            )
        if not settings.temperature > 0:
            raise ValueError(
                f"temperature is {settings.temperature}: training samples, so that the rollouts of "
                "a group differ; take a value above 0 (evaluation is greedy by itself)."
            )
        self.settings, self.make_engine, self.tools = settings, engine, list(tools)
        self.prompts_per_step, self.rollouts_per_prompt = prompts_per_step, rollouts_per_prompt
        self.seed, self.overlap = seed, overlap
        self.drop_probability: Callable[[float], float] = Constant(0.0)
        self.drop_mode: DropMode = "bernoulli"
        self.score: Scorer | None = None
        self.gate: Callable[[float], Gate] | None = None
        self.extend: Callable[[Collector, Plan, Sequence[RolloutGroup]], None] | None = None
        self.before_generation: Callable[[], None] | None = None
        self.collector: Collector | None = None
        self._coming: _Wave | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._trainer: Trainer | None = None
        self._synced: SyncedEngine | None = None
        self._sampling: Sampling | None = None
        self._next: list[Sample] = []
        self._begun = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts the engine and hands it to the loader."""
        if stage != "fit":
            return
        module = _policy_module(pl_module)
        self.check_group(module)
        policy = module.components
        self._trainer = trainer
        engine = self.make_engine(policy.model, precision=trainer.precision_plugin.forward_context)
        # Asking a protocol takes long, as does the tokenizer's vocabulary: once, not each step.
        self._synced = engine if isinstance(engine, SyncedEngine) else None
        self._sampling = self.settings.sampling(policy)
        if self.overlap and self._synced is None:
            raise ValueError(
                "rollout.overlap=true generates while the weights are trained, so it needs an "
                "engine with weights of its own: set rollout=vllm."
            )
        environment = make_environment(policy, self.tools, self.settings.budget)
        self.collector = Collector(
            engine=engine,
            # An engine that generates meanwhile must not wait for a tool.
            environment=replace(environment, tools_in_threads=self._synced is not None),
            prompts=self.settings.prompt,
            loop=EventLoopThread(),
            seed=self.seed,
            max_concurrent=self.settings.max_concurrent,
        )
        data: SampleDataModule = trainer.datamodule  # type: ignore[attr-defined]
        data.leave_out(self._too_long)
        # Generated samples are alike: where the first one does not fit, none does.
        if problem := self._too_long(data.train[0]):
            raise ValueError(f"Sample {data.train[0].id} cannot be played: {problem}.")
        if self._synced is not None:
            self.collector.loop.run(self._synced.start(trainer.strategy.root_device))
        module.loader.generate = self._generate

    def check_group(self, module: PolicyModule) -> None:
        """Checks that a group is large enough for the algorithm.

        Raises:
            ValueError: It is not: every advantage would be 0.
        """
        if self.rollouts_per_prompt < module.min_rollouts:
            raise ValueError(
                f"rollouts_per_prompt is {self.rollouts_per_prompt}: a group's baseline needs at "
                f"least {module.min_rollouts} rollouts, or every advantage is 0 and nothing is "
                "learned."
            )

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Begins the next step's prompts: the backward pass leaves time for them."""
        if self.collector is not None and self._next and not self._begun:
            self.collector.ahead.begin(self._next)
            self._begun = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops the engine and the tools."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stops them also where training fails."""
        self._stop()

    def _stop(self) -> None:
        # First: a call that still runs ends with its tool.
        close_tools(self.tools)
        if self.collector is not None:
            self.collector.ahead.close()
            self.collector.loop.cancel()
            self.collector.engine.close()
            self.collector.loop.stop()
            self.collector = None
        if self._thread is not None:
            self._thread.shutdown()
        self._coming = self._thread = self._synced = None
        self._next = []

    def _too_long(self, sample: Sample) -> str | None:
        """Why a sample cannot be played, found before the first step and not in the middle."""
        if self.collector is None:
            raise RuntimeError("Samples are checked once the engine is set up.")
        env, budget = self.collector.environment, self.settings.budget
        try:
            tokens, visual = prompt_tokens(
                sample, env.codec, env.encoder, env.view_maker, env.tools, self.settings.prompt
            )
        except (MediaError, ViewError) as error:
            return str(error)
        if tokens + self.settings.max_new_tokens > budget.max_context_tokens:
            return (
                f"its prompt has {tokens} tokens: with a turn of {self.settings.max_new_tokens} it "
                f"exceeds limits.max_context_tokens={budget.max_context_tokens}"
            )
        if visual > budget.max_visual_tokens:
            return (
                f"its media take {visual} visual tokens of "
                f"limits.max_visual_tokens={budget.max_visual_tokens}: lower limits.view_pixels"
            )
        return None

    def _generate(self) -> list[RolloutGroup]:
        trainer, collector, score = self._trainer, self.collector, self.score
        if trainer is None or collector is None:
            raise RuntimeError("Rollouts are asked for outside of fit.")
        if score is None:
            raise RuntimeError(
                "No reward: add callbacks/evidence_reward (EvidenceRewardCallback) to the trainer."
            )
        data: SampleDataModule = trainer.datamodule  # type: ignore[attr-defined]
        wave = self._coming or self._begin(trainer, collector)
        self._coming = None
        # Each rank generates as long as its own rollouts take.
        policy = _policy_module(trainer.lightning_module).policy
        if self._synced is None:
            check_gatherable(policy, "rollout=hf")
        with whole(policy):
            groups = wave.groups()
        if self._synced is not None:
            lag = trainer.global_step - wave.plan.policy_version
            _policy_module(trainer.lightning_module).log_step({"rollouts/lag": float(lag)})
            if not self.overlap:
                collector.loop.run(self._synced.rest())
        if self.extend:
            self.extend(collector, wave.plan, groups)
        data.advance(self.prompts_per_step)
        if trainer.current_epoch + 1 != trainer.max_epochs:
            if self.overlap:
                self._coming = self._begin(trainer, collector, ahead=1)
            else:
                self._next, self._begun = data.coming_samples(*self._share(trainer)), False
        for group in groups:
            for rollout in group.rollouts:
                score(rollout, group.sample, wave.progress)
        return groups

    def _begin(self, trainer: Trainer, collector: Collector, ahead: int = 0) -> _Wave:
        """Begins a step's rollouts with the present weights; the present step's run when asked for.

        Args:
            trainer: Whose data have come to where the step begins.
            collector: Plays them.
            ahead: Steps from the present one.
        """
        if self._synced is not None:
            if self.before_generation is None:
                raise RuntimeError(
                    "The engine has weights of its own, which nobody keeps up to date: add "
                    "callbacks/weight_sync (WeightSync) to the trainer."
                )
            self.before_generation()
            if self.overlap and self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="next-rollouts")
        module, progress = _policy_module(trainer.lightning_module), step_progress(trainer, ahead)
        data: SampleDataModule = trainer.datamodule  # type: ignore[attr-defined]
        samples, self._next = self._next or data.coming_samples(*self._share(trainer)), []
        if self._sampling is None:
            raise RuntimeError("Rollouts are asked for before the engine is set up.")
        plan = Plan(
            step=module.step + ahead,
            num_rollouts=self.rollouts_per_prompt,
            sampling=self._sampling,
            drop_probability=self.drop_probability(progress),
            drop_mode=self.drop_mode,
            policy_version=trainer.global_step,
            gate=self.gate(progress) if self.gate else None,
            earlier=data.earlier_appearances(*self._share(trainer)),
        )
        if ahead and self._thread is not None:
            return _Wave(
                plan, progress, self._thread.submit(collector.collect, samples, plan).result
            )
        return _Wave(plan, progress, lambda: collector.collect(samples, plan))

    def _share(self, trainer: Trainer) -> tuple[int, int, int]:
        """What of a step's samples is this rank's."""
        return self.prompts_per_step, trainer.global_rank, trainer.world_size


def step_progress(trainer: Trainer, ahead: int = 0) -> float:
    """P in [0, 1]: the share of the run's steps that is done, so many steps from now."""
    if trainer.max_epochs and trainer.max_epochs > 0:
        return min(1.0, (trainer.current_epoch + ahead) / trainer.max_epochs)
    return min(1.0, trainer.global_step / trainer.max_steps) if trainer.max_steps > 0 else 0.0


def find_callback(trainer: Trainer, kind: type[Any], wanted_by: str) -> Any:
    """Another callback of the same trainer.

    Raises:
        RuntimeError: There is none.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = next((c for c in callbacks if isinstance(c, kind)), None)
    if found is None:
        raise RuntimeError(f"{wanted_by} needs a {kind.__name__} among the trainer's callbacks.")
    return found


def _policy_module(module: LightningModule) -> PolicyModule:
    if not isinstance(module, PolicyModule):
        raise TypeError(
            f"{type(module).__name__} is not a PolicyModule: it has no policy to roll out."
        )
    return module
