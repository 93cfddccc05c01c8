"""Serves samples to the rollout loader, with a cursor that survives a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from reframe_vl.data.records import read_records
from reframe_vl.data.report import Report
from reframe_vl.types import MicroBatch, Sample

logger = logging.getLogger(__name__)


@runtime_checkable
class SampleSource(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """How many there are before they repeat."""

    def __getitem__(self, index: int) -> Sample:
        """One sample; the same for the same index."""


class RecordSource:
    """Samples of a records file, shuffled anew each time through.

    Args:
        path: A JSON-lines file of records.
        limit: Use the first so many records.
        on_error: ``raise``, or ``skip`` with a report of what was left out.
    """

    def __init__(
        self,
        path: str | Path,
        limit: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        """Reads the records; media are opened when they are looked at.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It holds no usable record.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"No records file at {self.path}: make one with src/build_data.py, and name it "
                "with data.path=FILE.jsonl."
            )
        report = Report(strict=on_error == "raise")
        records = read_records(self.path, on_error=on_error, report=report)[:limit]
        for reason, number in report.count_by_reason().items():
            logger.warning("%s: %d rows with %s", self.path, number, reason)
        if not records:
            raise ValueError(f"{self.path} holds no usable record.")
        self._samples: list[Sample] = [r.to_sample(self.path.parent) for r in records]

    def leave_out(self, problem_of: Callable[[Sample], str | None]) -> None:
        """Drops the samples that have a problem, and says how many and what the first one's is.

        Raises:
            ValueError: None is left.
        """
        problems = [problem_of(sample) for sample in self._samples]
        bad = [i for i, problem in enumerate(problems) if problem]
        if not bad:
            return
        first = self._samples[bad[0]].id
        logger.warning(
            "%s: %d of %d samples are left out; the first, %s: %s",
            self.path,
            len(bad),
            len(problems),
            first,
            problems[bad[0]],
        )
        kept = zip(self._samples, problems, strict=True)
        self._samples = [sample for sample, problem in kept if not problem]
        if not self._samples:
            raise ValueError(f"No sample of {self.path} is left: raise the limits.")

    def __len__(self) -> int:
        """Records."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        """A record's sample."""
        return self._samples[index]


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
    ) -> None:
        """Takes the sources over."""
        super().__init__()
        self.train = train
        self.evaluation = evaluation if evaluation is not None else train
        self.conflict = conflict
        self.seed = seed
        self.position = 0
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    def next_samples(self, count: int, rank: int = 0, world_size: int = 1) -> list[Sample]:
        """This rank's share of the next ``count`` samples; all ranks advance together."""
        positions = range(self.position + rank, self.position + count, world_size)
        self.position += count
        return [self.train[self._index(position)] for position in positions]

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

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.train))
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._order = (epoch, rng.permutation(len(self.train)))
        return int(self._order[1][offset])

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


def record_data(
    path: str | None,
    evaluation_path: str | None,
    evaluation_size: int,
    on_error: Literal["raise", "skip"],
    seed: int,
) -> SampleDataModule:
    """Training and evaluation samples of record files.

    Args:
        path: Training records.
        evaluation_path: Evaluation records; None takes the training records.
        evaluation_size: The first so many of them are used.
        on_error: What to do with rows that cannot be used.
        seed: Of the order.

    Raises:
        ValueError: No file was named.
    """
    if path is None:
        raise ValueError("data=records needs a records file: add data.path=FILE.jsonl.")
    return SampleDataModule(
        RecordSource(path, on_error=on_error),
        RecordSource(evaluation_path or path, evaluation_size, on_error),
        seed=seed,
    )
