"""Serves samples to the rollout loader, with a cursor that survives a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningDataModule

from reframe_vl.data.order import SeededOrder
from reframe_vl.data.records import Record, iter_records
from reframe_vl.data.report import Problem, Report
from reframe_vl.data.validation import validate_record
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
        limit: Use the first so many records that can be used.
        on_error: ``raise``, or ``skip`` with a report of what was left out.

    Attributes:
        report: What was left out, and why.
    """

    def __init__(
        self,
        path: str | Path,
        limit: int | None = None,
        on_error: str = "raise",
    ) -> None:
        """Reads and checks the records; of an image the header is read, of a video one frame.

        Raises:
            FileNotFoundError: There is no such file.
            RecordError: A record cannot be used, with ``raise``.
            ValueError: It holds no usable record, or ``on_error`` is something else.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(
                f"data.on_error is {on_error!r}: give raise, to stop at the first record that "
                "cannot be used, or skip, to leave such records out."
            )
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"No records file at {self.path}: make one with src/build_data.py, and name it "
                "with data.path=FILE.jsonl."
            )
        # A folder of media that is not there makes as many problems as there are records.
        self.report = Report(strict=on_error == "raise", log_level=logging.DEBUG)
        self._samples: list[Sample] = []
        for record in iter_records(self.path, self.report):
            problem = self._problem(record)
            if problem is not None:
                self.report.add(problem)
                continue
            self._samples.append(record.to_sample(self.path.parent))
            if len(self._samples) == limit:
                break
        self.report.num_kept = len(self._samples)
        for (reason, _), number in self.report.count_by_reason().items():
            first = next(p for p in self.report.problems if p.reason == reason)
            logger.warning("Records left out (%s): %d; the first: %s", reason, number, first)
        if not self._samples:
            firsts = "".join(f" The first problem: {p}" for p in self.report.problems[:1])
            raise ValueError(f"{self.path} holds no usable record.{firsts}")

    def _problem(self, record: Record) -> Problem | None:
        """The first reason why a record cannot be used."""
        where = f"{self.path}, record {record.id}"
        odd = record.sample_problem()
        if odd is not None:
            return Problem(where, *odd)
        found = validate_record(record, self.path.parent)
        return replace(found[0], where=where) if found else None

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
            raise ValueError(
                f"No sample of {self.path} can be used; the first, {first}: {problems[bad[0]]}"
            )

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
        self.position = 0
        self._order = SeededOrder(seed)

    def next_samples(self, count: int, rank: int = 0, world_size: int = 1) -> list[Sample]:
        """This rank's share of the next ``count`` samples; all ranks advance together."""
        samples = self.coming_samples(count, rank, world_size)
        self.position += count
        return samples

    def coming_samples(self, count: int, rank: int = 0, world_size: int = 1) -> list[Sample]:
        """What ``next_samples`` will give."""
        positions = range(self.position + rank, self.position + count, world_size)
        return [self.train[self._order.index(at, len(self.train))] for at in positions]

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
    path: str | None,
    evaluation_path: str | None,
    evaluation_size: int,
    on_error: str,
    seed: int,
) -> SampleDataModule:
    """Training and evaluation samples of record files.

    Args:
        path: Training records.
        evaluation_path: Evaluation records; None takes the training records.
        evaluation_size: The first so many of them are used.
        on_error: What to do with records that cannot be used: ``raise`` or ``skip``.
        seed: Of the order.

    Raises:
        ValueError: No file was named, or a setting cannot work.
    """
    check_evaluation_size(evaluation_size)
    if path is None:
        raise ValueError("data=records needs a records file: add data.path=FILE.jsonl.")
    return SampleDataModule(
        RecordSource(path, on_error=on_error),
        RecordSource(evaluation_path or path, evaluation_size, on_error),
        seed=seed,
    )
