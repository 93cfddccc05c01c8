"""Keeps an engine's weights those of the trainer, and proves it before each step's rollouts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.rollout import RolloutCallback, find_callback
from reframe_vl.policy.divergence import mean_gap
from reframe_vl.policy.score import score
from reframe_vl.policy.sharding import is_sharded, pushed
from reframe_vl.rollout.collector import Collector
from reframe_vl.rollout.engine import Generation, SharedEngine, SyncedEngine
from reframe_vl.rollout.prompt import build_prompt
from reframe_vl.types import Context, Provenance, Sampling, Span

logger = logging.getLogger(__name__)

PROBE_TOKENS = 16
"""Of a probed turn at most."""

_MAX_GAP, _MAX_GAP_LOW_PRECISION = 1e-3, 0.1


class WeightSync(Callback):
    """Pushes the weights before rollouts are generated, and probes whether they arrived.

    The probe samples a turn after a prompt with its images and one after the same without, as in
    training, and scores it with the trainer's weights: engine and trainer must agree on how likely
    it was.

    Args:
        max_gap: The mean difference of a token's log-probs above which there is an alarm; None is
            1e-3 where engine and trainer compute in float32, else 0.1.
    """

    def __init__(self, max_gap: float | None = None) -> None:
        """Keeps the limit."""
        if max_gap is not None and not max_gap > 0:
            raise ValueError(f"callbacks.weight_sync.max_gap is {max_gap}: it must be above 0.")
        self.max_gap = max_gap
        self._probes: list[Context] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Has itself called before generation; sampler and policy are two things from now on."""
        if stage != "fit" or not isinstance(pl_module, PolicyModule):
            return
        rollouts: RolloutCallback = find_callback(trainer, RolloutCallback, "weight_sync")
        rollouts.before_generation = lambda: self._sync(trainer, pl_module, rollouts)
        pl_module.engine_is_trainer = False

    def _sync(self, trainer: Trainer, module: PolicyModule, rollouts: RolloutCallback) -> None:
        collector = rollouts.collector
        if collector is None or not isinstance(collector.engine, SyncedEngine):
            raise RuntimeError(
                "callbacks.weight_sync is for engines with weights of their own: set rollout=vllm, "
                "or callbacks.weight_sync=null."
            )
        engine = collector.engine
        started = time.perf_counter()
        # Ranks that share an engine: none may still be generating, and one pushes for all.
        if engine.shared:
            trainer.strategy.barrier("rollouts done")
        if not engine.shared or trainer.is_global_zero:
            collector.loop.run(engine.sync(module.policy, trainer.global_step))
        elif is_sharded(module.policy):
            for _ in pushed(module.policy):
                # The rank that pushes takes this one's part of each tensor; it is not kept here.
                pass
        if engine.shared:
            trainer.strategy.barrier("weights pushed")
            if isinstance(engine, SharedEngine):
                served = trainer.strategy.broadcast(engine.served)
                if not trainer.is_global_zero:
                    collector.loop.run(engine.follow(served))
        module.log_step({"weights/sync_s": time.perf_counter() - started})
        self._probe(trainer, module, rollouts, collector)

    # ------------------------------------------------------------------ probe

    def _probe(
        self,
        trainer: Trainer,
        module: PolicyModule,
        rollouts: RolloutCallback,
        collector: Collector,
    ) -> None:
        self._probes = self._probes or self._make_probes(trainer, rollouts, collector)
        how = rollouts.settings.sampling(module.components)
        how = replace(how, max_new_tokens=min(how.max_new_tokens, PROBE_TOKENS))
        turns = collector.loop.run(_turns(collector, self._probes, how))
        contexts = [
            Context([*probe.spans, Span(Provenance.SAMPLED, turn.token_ids)])
            for probe, turn in zip(self._probes, turns, strict=True)
        ]
        with module.scoring():
            ours = score(module.policy, contexts, how).logprobs_T.cpu().numpy()
        theirs = np.asarray([p for turn in turns for p in turn.logprobs], np.float32)
        gap = mean_gap(ours, theirs)
        single = module.policy.dtype is torch.float32 and trainer.precision == "32-true"
        limit = self.max_gap or (_MAX_GAP if single else _MAX_GAP_LOW_PRECISION)
        module.log_step({"weights/probe_gap": gap, "weights/alarm": float(not gap <= limit)})
        if not gap <= limit:
            logger.error(
                "Step %d: after the weight sync engine and trainer differ by %.3g a token on a "
                "probe (at most %g is expected): rollouts are of another policy than the one that "
                "is trained. Check that the engine serves the model that is trained, in its dtype.",
                module.step,
                gap,
                limit,
            )

    def _make_probes(
        self, trainer: Trainer, rollouts: RolloutCallback, collector: Collector
    ) -> list[Context]:
        """A prompt with its images, and what is left of it after a drop."""
        env = collector.environment
        prompt = build_prompt(
            trainer.datamodule.train[0],  # type: ignore[attr-defined]
            env.codec,
            env.encoder,
            env.view_maker,
            env.tools,
            rollouts.settings.prompt,
        )
        return [Context([prompt.full]), Context([prompt.text_only])]


async def _turns(
    collector: Collector, probes: Sequence[Context], how: Sampling
) -> list[Generation]:
    engine, names = collector.engine, [f"probe {i}" for i in range(len(probes))]
    engine.open(names)
    try:
        return await asyncio.gather(
            *(
                engine.generate(name, probe, how, seed)
                for seed, (name, probe) in enumerate(zip(names, probes, strict=True))
            )
        )
    finally:
        for name in names:
            engine.release(name)
