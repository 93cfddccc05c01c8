"""Adds auxiliary models' rollouts to each step's groups, and counts what they cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from reframe_vl.algorithms.ekipl import EKIPL
from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.callbacks.rollout import RolloutCallback, find_callback
from reframe_vl.rollout.auxiliary import add_rollouts, make_auxiliary
from reframe_vl.rollout.collector import Collector, Plan
from reframe_vl.types import RolloutGroup

logger = logging.getLogger(__name__)


class AuxiliaryCallback(Callback):
    """Lets auxiliary models play what the policy plays.

    Args:
        auxiliaries: Settings of each by its name, see ``rollout.auxiliary.make_auxiliary``.
        rollouts: N, rollouts of each in a group.
        cache: A file that keeps the answers of endpoints; None keeps none.
    """

    def __init__(
        self,
        auxiliaries: Mapping[str, Any] | None,
        rollouts: int,
        cache: str | Path | None = None,
    ) -> None:
        """Checks the settings; nothing is loaded or asked yet.

        Raises:
            ValueError: There are no auxiliaries, or a setting is wrong.
            FileNotFoundError: A checkpoint is not there.
        """
        if not auxiliaries:
            raise ValueError(
                "There is no auxiliary model: add 'auxiliaries={NAME:{checkpoint:RUN}}' or "
                "'auxiliaries={NAME:{url:URL,model:MODEL,api_key_env:VARIABLE}}'."
            )
        if rollouts < 1:
            raise ValueError(f"An auxiliary's rollouts are {rollouts}: give at least 1 a prompt.")
        path = Path(cache) if cache else None
        self.auxiliaries = [make_auxiliary(n, given, path) for n, given in auxiliaries.items()]
        self.rollouts = rollouts

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connects the auxiliaries and joins the rollouts.

        Raises:
            ValueError: The loss asks for probabilities that an auxiliary does not tell.
        """
        if stage != "fit" or not isinstance(pl_module, PolicyModule):
            return
        silent = [a.name for a in self.auxiliaries if not a.has_logprobs]
        if silent and isinstance(pl_module, EKIPL) and pl_module.settings.auxiliary_ratio:
            raise ValueError(
                f"auxiliary_ratio needs the probabilities of {', '.join(silent)}, which an "
                "endpoint does not tell for the policy's tokens: set it to false."
            )
        for auxiliary in self.auxiliaries:
            auxiliary.connect(pl_module.components)
        find_callback(trainer, RolloutCallback, type(self).__name__).extend = self._extend

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs what each auxiliary has been asked for so far, and what it cost."""
        if not isinstance(pl_module, PolicyModule):
            return
        for auxiliary in self.auxiliaries:
            tally = auxiliary.tally
            numbers = {
                "asked": tally.answered + sum(tally.failures.values()),
                "cached": tally.cached,
                "failed": sum(tally.failures.values()),
                "cost": tally.cost,
            }
            # What is logged is the ranks' mean, and each has asked for its own samples.
            pl_module.log_step(
                {
                    f"auxiliary/{auxiliary.name}/{name}": float(value) * trainer.world_size
                    for name, value in numbers.items()
                }
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Closes the auxiliaries and says what they came to."""
        for auxiliary in self.auxiliaries:
            auxiliary.close()
            if auxiliary.tally.answered or auxiliary.tally.failures:
                logger.info("Auxiliary %s: %s", auxiliary.name, auxiliary.tally.as_dict())

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Closes them also where training fails."""
        for auxiliary in self.auxiliaries:
            auxiliary.close()

    def state_dict(self) -> dict[str, Any]:
        """The cost so far."""
        return {auxiliary.name: auxiliary.tally.as_dict() for auxiliary in self.auxiliaries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        for auxiliary in self.auxiliaries:
            if auxiliary.name in state_dict:
                auxiliary.tally.resume(state_dict[auxiliary.name])

    def _extend(self, collector: Collector, plan: Plan, groups: Sequence[RolloutGroup]) -> None:
        for auxiliary in self.auxiliaries:
            add_rollouts(auxiliary, self.rollouts, collector, plan, groups)
