"""Serves samples to the rollout loader, with a cursor that survives a resume."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningDataModule

from reframe_vl.data.order import MixedOrder, Order, SeededOrder, is_weight
from reframe_vl.data.record_source import COLUMNS, Choice, Column, RecordSource
from reframe_vl.types import MicroBatch, Sample

logger = logging.getLogger(__name__)

_ONLY_EXAMPLE = "'data.only={modality:[image]}'"


@runtime_checkable
class SampleSource(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """How many there are before they repeat."""

    def __getitem__(self, index: int) -> Sample:
        """One sample; the same for the same index."""


class SampleDataModule(LightningDataModule):
    """Training samples in a seeded order, and fixed samples for evaluation.

    Attributes:
        train: Training samples.
        evaluation: Samples of the final table; the training samples where there are none.
        conflict: The same with a shortcut that is always wrong; None where that means nothing.
        position: Samples served so far, over all ranks; saved with checkpoints.
    """

    def __init__(
        self,
        train: SampleSource,
        evaluation: SampleSource | None = None,
        conflict: SampleSource | None = None,
        seed: int = 0,
        order: Order | None = None,
    ) -> None:
        """Takes the sources over; without an order the training samples are shuffled each pass."""
        super().__init__()
        self.train = train
        self.evaluation = evaluation if evaluation is not None else train
        self.conflict = conflict
        self.position = 0
        self._order = order or SeededOrder(seed)

    def coming_samples(self, count: int, rank: int = 0, world_size: int = 1) -> list[Sample]:
        """This rank's share of the next ``count`` samples; the cursor stays."""
        positions = range(self.position + rank, self.position + count, world_size)
        return [self.train[self._order.index(at, len(self.train))] for at in positions]

    def earlier_appearances(self, count: int, rank: int = 0, world_size: int = 1) -> list[int]:
        """Of this rank's share: how often each comes earlier among the next ``count`` samples.

        Those of other ranks count too: a sample that comes twice in a step is played with other
        seeds the second time, wherever that is.
        """
        positions = range(self.position, self.position + count)
        seen: Counter[int] = Counter()
        found = []
        for index in (self._order.index(at, len(self.train)) for at in positions):
            found.append(seen[index])
            seen[index] += 1
        return found[rank::world_size]

    def advance(self, count: int) -> None:
        """Puts the cursor behind the next ``count`` samples, on all ranks alike."""
        self.position += count

    def leave_out(self, problem_of: Callable[[Sample], str | None]) -> None:
        """Drops samples of record files that have a problem, before the first step."""
        for source in (self.train, self.evaluation):
            if isinstance(source, RecordSource):
                source.leave_out(problem_of)

    def evaluation_samples(self, limit: int | None = None) -> list[Sample]:
        """The first so many samples for evaluation."""
        return _first(self.evaluation, limit)

    def conflict_samples(self, limit: int | None = None) -> list[Sample] | None:
        """The same with a misleading shortcut, where the data have such a set."""
        return None if self.conflict is None else _first(self.conflict, limit)

    def train_dataloader(self) -> Any:
        """Samples reach training as rollouts: the algorithm's loader asks for them by the step."""
        if self.trainer is None:
            raise RuntimeError("The data module is not attached to a trainer.")
        return self.trainer.lightning_module.train_dataloader()

    def transfer_batch_to_device(
        self, batch: MicroBatch, device: torch.device, dataloader_idx: int
    ) -> MicroBatch:
        """Micro-batches hold no tensors: ``policy.score`` places what it builds."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts the cursor back."""
        self.position = state_dict["position"]


def _first(source: SampleSource, limit: int | None) -> list[Sample]:
    return [source[i] for i in range(len(source) if limit is None else min(limit, len(source)))]


def check_evaluation_size(size: object) -> None:
    """Refuses what is no number of items.

    Raises:
        ValueError: It is not whole, or below 1.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"data.evaluation_size is {size!r}: give the number of evaluation items, a whole "
            "number of at least 1."
        )


def record_data(
    path: object,
    evaluation_path: object,
    evaluation_size: int,
    on_error: str,
    seed: int,
    validation_share: float = 0.0,
    only: object = None,
    mix_by: object = "source",
    weights: object = None,
) -> SampleDataModule:
    """Training and evaluation samples of record files; settings as they come from a config.

    Args:
        path: Training records.
        evaluation_path: Evaluation records; None takes the training records.
        evaluation_size: So many of them are used, drawn evenly from the file.
        on_error: What to do with records that cannot be used: ``raise`` or ``skip``.
        seed: Of the order.
        validation_share: Without evaluation records: the share of the training records' media that
            is kept out of training and for evaluation.
        only: By ``source``, ``modality``, ``applicability``: the names of the records used, or one.
        mix_by: Which of these the weights are for.
        weights: How often training draws the records of each name; None draws all alike.

    Raises:
        ValueError: No file was named, or a setting cannot work.
    """
    check_evaluation_size(evaluation_size)
    if path is None:
        raise ValueError("data=records needs a records file: add data.path=FILE.jsonl.")
    training_file = _file(path, "path")
    evaluation_file = _file(evaluation_path or training_file, "evaluation_path")
    if validation_share and evaluation_path is not None:
        raise ValueError(
            f"data.validation_share={validation_share} takes evaluation records from data.path, "
            "but data.evaluation_path is given too: leave one of them out."
        )
    chosen = _chosen(only)
    column, shared = _column(mix_by, "mix_by"), _weights(weights)
    if shared is None and column != "source":
        logger.warning("data.mix_by=%s changes nothing without data.weights={…}.", column)
    train = RecordSource(training_file, None, on_error, Choice(chosen, "train", validation_share))
    evaluation = RecordSource(
        evaluation_file,
        evaluation_size,
        on_error,
        Choice(chosen, "validation", validation_share),
    )
    order = None
    if shared is not None:
        order = MixedOrder(seed, shared, lambda: train.labels(column))
    return SampleDataModule(train, evaluation, seed=seed, order=order)


def _column(name: object, setting: str) -> Column:
    for column in COLUMNS:
        if name == column:
            return column
    raise ValueError(f"data.{setting} names {name!r}: give one of {', '.join(COLUMNS)}.")


def _file(given: object, setting: str) -> Path:
    if not isinstance(given, str | Path):
        raise ValueError(f"data.{setting} is {given!r}: give the name of one records file.")
    return Path(given)


def _chosen(only: object) -> dict[Column, tuple[str, ...]]:
    if only is None:
        return {}
    if not isinstance(only, Mapping):
        raise ValueError(
            f"data.only is {only!r}: say by what the names are meant, as in {_ONLY_EXAMPLE}."
        )
    chosen = {}
    for key, given in only.items():
        column = _column(key, "only")
        names = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        if not names or not all(_is_name(name) for name in names):
            raise ValueError(
                f"data.only.{column} is {given!r}: give a name or a list of names, as in "
                f"{_ONLY_EXAMPLE}; leave {column} out to use all."
            )
        chosen[column] = tuple(str(name) for name in names)
    return chosen


def _is_name(given: object) -> bool:
    """A name that is a whole number is read as one from a command."""
    return isinstance(given, str | int) and not isinstance(given, bool)


def _weights(given: object) -> dict[str, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not given:
        raise ValueError(
            f"data.weights is {given!r}: give a number for each name, as in "
            "'data.weights={image:1,video:1}', or null to draw all records alike."
        )
    weights = {str(name): weight for name, weight in given.items()}
    for name, weight in weights.items():
        if not is_weight(weight):
            raise ValueError(
                f"data.weights.{name} is {weight!r}: give a number of at least 0; 0 leaves {name} "
                "out."
            )
    return weights
