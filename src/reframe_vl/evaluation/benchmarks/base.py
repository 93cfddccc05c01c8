"""What a benchmark is, and what all of them share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import ValidationError

from reframe_vl.data.evidence import MAX_FRAMES, expand_box, expand_segments, subsample_frames
from reframe_vl.data.formats.choices import number_of_letter
from reframe_vl.data.formats.rows import Refused, Row
from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.records import describe
from reframe_vl.data.report import Problem, Report
from reframe_vl.data.video import VideoFile
from reframe_vl.evaluation.releases.files import Hub, files_of, hub_rows, rows_of
from reframe_vl.evaluation.releases.media import MediaStore
from reframe_vl.evaluation.rules.letters import read_letter
from reframe_vl.evaluation.rules.scores import Draws, Scored
from reframe_vl.evaluation.rules.spans import Span
from reframe_vl.rewards.answer import is_right
from reframe_vl.rewards.choice import letter_of
from reframe_vl.types import Answer, Box, Evidence, Modality, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """One question of a benchmark.

    Attributes:
        cluster: Items of one cluster are no independent evidence: those that look at one medium,
            unless the benchmark says otherwise.
        groups: What the benchmark's averages go by; an item may have several labels of a kind.
        facts: What the scoring rule needs beside the sample.
    """

    sample: Sample
    cluster: str
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """What a policy gave on an item.

    Attributes:
        text: The content of its last answer block; empty where it gave none.
        boxes: Regions that its own calls returned, in pixels of the image.
        spans: Time that its own calls returned frames of, merged.
    """

    text: str
    boxes: tuple[Box, ...] = ()
    spans: tuple[Span, ...] = ()


class JudgeError(RuntimeError):
    """The judge gave no verdict: the answer is neither right nor wrong."""


@runtime_checkable
class Judge(Protocol):
    """Tells whether an open answer says the same as the reference."""

    @property
    def identity(self) -> str:
        """Who judges, and by which words."""

    def same(self, question: str, reference: str, answer: str) -> bool:
        """Whether it does.

        Raises:
            JudgeError: There is no verdict.
        """


class Benchmark(ABC):
    """Turns the rows of one release into items, and scores responses by the benchmark's own rule.

    One file of this package has one such class. It says what a row means (``item``), what a
    response is worth (``score``) and what is averaged how (``measures``).

    Attributes:
        name: The name of the file, without ``.py``.
        primary: The measure that stands for the benchmark in tables.
        is_binary: Whether ``score`` is 0 or 1: else pass@k is not defined.
        terms: Names of what ``score`` gives for an item.
        by: Kinds of labels by which accuracy is also given.
        hub: Where the release lies on the hub.
        files: Patterns of its files, where a folder is given: the first that matches any counts.
    """

    name: ClassVar[str]
    primary: ClassVar[str] = "accuracy"
    is_binary: ClassVar[bool] = True
    terms: ClassVar[tuple[str, ...]] = ("score",)
    by: ClassVar[tuple[str, ...]] = ()
    hub: ClassVar[Hub | None] = None
    files: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        """Names the class by its file."""
        cls.name = cls.__module__.rpartition(".")[2]

    def __init__(self, path: Path | None, media: MediaStore, *, with_windows: bool = False) -> None:
        """Names the files; none is opened yet.

        Args:
            path: A file or a folder of files; None reads from the hub.
            media: Finds what rows name.
            with_windows: Make evidence of annotated windows, so that calls can be forced. It reads
                through every video for the times of its frames. (Evidence is always made of boxes.)

        Raises:
            ValueError: There is no path, and nothing on the hub.
        """
        if path is None and self.hub is None:
            raise ValueError(f"{self.name} can only be read from files: set benchmark_path.")
        self.path, self.media, self.with_windows = path, media, with_windows

    @abstractmethod
    def item(self, row: Row) -> Item:
        """Makes the item of a row.

        Raises:
            Refused: It can be none.
            ValidationError: A field is missing or of the wrong type.
        """

    def score(self, item: Item, response: Response, judge: Judge | None = None) -> dict[str, float]:
        """The terms of a response; ``score`` is among them. Those that do not apply are left out.

        Raises:
            JudgeError: The judge gave no verdict.
        """
        if item.sample.answer.kind == "mcq":
            letter = read_letter(response.text, item.sample.options)
            return {"score": float(letter == item.sample.answer.value)}
        return {"score": open_score(item.sample, response.text, judge)}

    def measures(self, scored: Scored) -> dict[str, Draws]:
        """Every measure of the benchmark."""
        found = {"accuracy": scored.mean("score")}
        for kind in self.by:
            for label in scored.labels(kind):
                found[f"accuracy/{kind}={label}"] = scored.mean("score", **{kind: label})
        return found

    def rows(self) -> Iterator[Row | Problem]:
        """The release's rows in its order; what is no row is a problem."""
        if self.path is not None:
            for path in files_of(self.path, self.files):
                yield from rows_of(path)
        elif self.hub is not None:
            yield from hub_rows(self.hub)

    def items(self, report: Report) -> list[Item]:
        """The items in the release's order; odd rows go to the report.

        Raises:
            ValueError: There is no item.
        """
        found: dict[str, Item] = {}
        for row in self.rows():
            if isinstance(row, Problem):
                report.add(row)
                continue
            try:
                item = self.item(row)
                if item.sample.id in found:
                    raise Refused("duplicate_row", f"an earlier row is {item.sample.id} too.")
            except Refused as refused:
                report.add(refused.at(row.where))
            except ValidationError as error:
                report.add(Problem(row.where, "bad_row", f"{describe(error)}. Mend the row."))
            else:
                found[item.sample.id] = item
                report.num_kept += 1
        if not found:
            first = f" The first problem: {report.problems[0]}" if report.problems else ""
            raise ValueError(f"{self.name}: {self.path or self.hub} holds no usable row.{first}")
        return list(found.values())

    # ------------------------------------------------------------------ parts of an item

    def draft(
        self,
        native_id: object,
        media: ImageFile | VideoFile,
        question: str,
        answer: Answer,
        options: Sequence[str] = (),
        *,
        groups: Mapping[str, str | Sequence[str]] | None = None,
        cluster: str = "",
        boxes: Sequence[Box] = (),
        windows: Sequence[Span] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> Item:
        """An item, with what is the same for all benchmarks.

        Args:
            boxes: Annotated, in pixels of the image; not expanded.
            windows: Annotated, in seconds; not expanded.

        Raises:
            Refused: There is no question, or the answer is empty.
        """
        if not question.strip() or not answer.value.strip():
            raise Refused("empty", "the question or the answer is empty. Leave the row out.")
        evidence = None
        if isinstance(media, ImageFile) and boxes:
            evidence = _expanded(boxes, media)
        if self.with_windows and isinstance(media, VideoFile) and windows:
            evidence = _segments(media, windows)
        sample = Sample(
            id=_whole_characters(f"{self.name}/{native_id}"),
            modality=Modality.IMAGE if isinstance(media, ImageFile) else Modality.VIDEO,
            media=media,
            question=_whole_characters(question.strip()),
            answer=answer,
            options=tuple(map(_whole_characters, options)),
            evidence=evidence,
            source=self.name,
            split="test",
        )
        labels = {
            kind: (label,) if isinstance(label, str) else tuple(label)
            for kind, label in (groups or {}).items()
        }
        return Item(sample, cluster or str(media.path), labels, facts or {})


def open_score(sample: Sample, text: str, judge: Judge | None) -> float:
    """1 for an answer that is the reference word for word, or that the judge takes for the same.

    Raises:
        JudgeError: The judge gave no verdict.
    """
    if is_right(text, sample.answer, sample.options):
        return 1.0
    if judge is None or not text.strip():
        return 0.0
    return float(judge.same(sample.question, sample.answer.value, text))


def right_option(letter: str, options: Sequence[str]) -> Answer:
    """The answer to a multiple-choice question.

    Raises:
        Refused: The letter is not that of an option.
    """
    number = number_of_letter(letter.strip().strip("()."))
    # Oddities that would leave a row out of training stay: scores are on the whole benchmark.
    if options and number >= len(options):
        raise Refused(
            "answer_not_among_options", f"the answer {letter!r} is none of {len(options)} options."
        )
    return Answer("mcq", letter_of(number))


def _whole_characters(text: str) -> str:
    r"""Halves of characters, which JSON can hold but no tokenizer takes, become U+FFFD.

    >>> _whole_characters("a\ud83d") == "a\ufffd"
    True
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _expanded(boxes: Sequence[Box], media: ImageFile) -> Evidence | None:
    try:
        return Evidence(boxes=tuple(expand_box(box, media.size) for box in boxes))
    except ValueError as error:
        # The question is answered all the same: a score is on the whole benchmark.
        logger.warning("%s has no evidence: %s", media.path.name, error)
        return None


def _segments(video: VideoFile, windows: Sequence[Span]) -> Evidence | None:
    try:
        runs = expand_segments(windows, video.timestamps_s, video.facts.duration_s)
    except (ValueError, MediaError) as error:
        logger.warning("%s has no evidence: %s", video.path.name, error)
        return None
    return Evidence(segments=tuple(subsample_frames(run, MAX_FRAMES) for run in runs))
