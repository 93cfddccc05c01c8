"""What an adapter is, and what all adapters share."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from pydantic import ValidationError

from reframe_vl.data.formats.boxes import fit_boxes
from reframe_vl.data.formats.media_facts import MediaFacts
from reframe_vl.data.formats.media_folder import MediaFolder
from reframe_vl.data.formats.rows import STAGE, Refused, Row, check_path, kept
from reframe_vl.data.records import (
    AnswerInfo,
    AuditEntry,
    LabelledBox,
    MediaInfo,
    Record,
    Seconds,
    describe,
)
from reframe_vl.data.report import Problem, Report
from reframe_vl.data.video import GridRule
from reframe_vl.types import Modality

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
}
"""How compressed files begin."""

_MAX_DEPTH = 150
"""Readers of JSON give up on values that are nested deeper than about 200."""


class Source(ABC):
    """Turns one published data set into records; one file of this package has one such class.

    An adapter says what rows its files hold (``rows``) and what a row means (``record``). Reading
    media, fitting boxes and reporting are the same for all (``records``). Evidence is expanded when
    the pipeline ends (``stages.finalise``).

    Attributes:
        name: The name of the file, without ``.py``.
        licence: Of images or videos and annotations, as published.
        encoding: How the source writes boxes or segments, in words.
        suffixes: Of the annotation files, where a folder of them is given.
    """

    name: ClassVar[str]
    licence: ClassVar[str]
    encoding: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = (".json", ".jsonl")

    def __init_subclass__(cls) -> None:
        """Names the class by its file."""
        cls.name = cls.__module__.rpartition(".")[2]

    def __init__(
        self,
        annotations: Path | Sequence[Path],
        media: Path | None = None,
        grid: GridRule | None = None,
        facts: MediaFacts | None = None,
    ) -> None:
        """Names the files; none is opened yet.

        Args:
            annotations: A file, a folder of files, or several of them.
            media: The folder of the images or videos. None leaves media unread: then records name
                them as the source does, and sizes are known only where the source states them.
            grid: Lays the grids of videos.
            facts: Keeps what was read of media for other runs.
        """
        self.annotations = [annotations] if isinstance(annotations, Path) else list(annotations)
        self.media = None if media is None else MediaFolder(media, grid or GridRule(), facts)

    @abstractmethod
    def rows(self) -> Iterator[Row | Problem]:
        """Yields the source's rows in its order, one by one; what is no row is a problem."""

    @abstractmethod
    def record(self, row: Row) -> Record:
        """Makes the record of a row, with boxes and segments as annotated, not expanded.

        Raises:
            Refused: It can be none.
            ValidationError: A field is missing or of the wrong type.
        """

    def native(self, record: Record) -> Any:
        """The source's row again: JSON, or the text of a line or file, exactly."""
        return record.raw

    def native_id(self, raw: dict[str, Any]) -> Hashable:
        """What the source itself calls a row; None where it has no name."""
        return None

    def files(self) -> Iterator[Path]:
        """The annotation files that can be read; those of a folder by name."""
        return (path for path in self._given() if isinstance(path, Path))

    def _given(self) -> Iterator[Path | Problem]:
        """The annotation files, and what is wrong with what is none."""
        for path in self.annotations:
            if not path.is_dir():
                yield _unusable(path) or path
                continue
            found = [p for p in path.iterdir() if p.suffix.lower() in self.suffixes and p.is_file()]
            for file in sorted(found):
                yield _unusable(file) or file
            if not found:
                message = f"the folder has no file {' or '.join(self.suffixes)}. Give another."
                yield Problem(str(path), "no_file", message)

    def records(self, report: Report) -> Iterator[Record]:
        """Yields records in the source's order; odd rows go to the report."""
        seen: set[str] = set()
        called: set[Hashable] = set()
        wrong = (problem for problem in self._given() if isinstance(problem, Problem))
        for row in chain(wrong, self.rows()):
            if isinstance(row, Problem):
                report.add(row)
                continue
            try:
                record = self._finished(self.record(row))
                if record.id in seen:
                    raise Refused("duplicate_row", "an earlier row says the same. Remove one.")
            except Refused as refused:
                report.add(refused.at(row.where))
                continue
            except ValidationError as error:
                message = f"{describe(error)}. Mend or remove the row."
                report.add(Problem(row.where, "bad_row", message))
                continue
            seen.add(record.id)
            record = self._with_repeated_id(record, called)
            for entry in record.audit:
                if entry.reason is not None:
                    report.add(Problem(row.where, entry.reason, f"{entry.note}.", kept=True))
            report.num_kept += 1
            yield record

    def draft(
        self,
        row: Row,
        *,
        modality: Modality,
        media: MediaInfo,
        split: str,
        question: str,
        answer: AnswerInfo,
        options: tuple[str, ...] = (),
        boxes: Iterable[LabelledBox] = (),
        segments: tuple[Seconds, ...] = (),
        notes: Iterable[AuditEntry] = (),
        encoding: str | None = None,
    ) -> Record:
        """A record of a row, with what is the same for all of this source.

        Args:
            notes: What was odd; an entry with a reason is reported.
            encoding: In place of the source's own, where files differ.

        Raises:
            Refused: There is no question or no answer, or the text cannot be written as UTF-8.
            ValidationError: A field is wrong.
        """
        if not question.strip():
            raise Refused("empty_question", "the row asks nothing. Leave it out.")
        if not answer.value.strip():
            raise Refused("empty_answer", "the answer is empty. Leave the row out.")
        origin = AuditEntry(stage=STAGE, note=f"read from {row.path.name}, {row.place}")
        return Record(
            id=self._id(row.raw, media.path),
            source=self.name,
            split=split,
            licence=self.licence,
            raw=row.raw,
            modality=modality,
            media=media,
            question=question.strip(),
            options=options,
            answer=answer,
            boxes=tuple(boxes),
            segments=segments,
            native_encoding=encoding or self.encoding,
            audit=(origin, *notes),
        )

    def _id(self, raw: dict[str, Any], path: str) -> str:
        text = json.dumps(raw, sort_keys=True)
        _check_writable(raw, text)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.name}/{PurePosixPath(path).stem}/{digest}"

    def _finished(self, record: Record) -> Record:
        notes = []
        if self.media is not None:
            record = self.media.attach(record)
        elif unknown := _unknown(record):
            note = f"not known until the media are read: {', '.join(unknown)}"
            notes.append(AuditEntry(stage=STAGE, note=note))
        record = fit_boxes(record)
        if record.modality is Modality.IMAGE and not record.boxes:
            notes.append(kept("no_box", "the row has no box: no evidence"))
        if record.modality is Modality.VIDEO and not record.segments:
            notes.append(kept("no_segment", "the row has no window: no evidence"))
        return record.model_copy(update={"audit": (*record.audit, *notes)})

    def _with_repeated_id(self, record: Record, called: set[Hashable]) -> Record:
        name = self.native_id(record.raw)
        if name is None or name not in called:
            called.add(name)
            return record
        note = kept("repeated_id", f"an earlier, different row has the source's id {name!r} too")
        return record.model_copy(update={"audit": (*record.audit, note)})


def _unusable(path: Path) -> Problem | None:
    """Says why a file is not read: compressed ones look damaged otherwise, line by line."""
    try:
        check_path(path)
    except Refused as refused:
        # The path itself could not be written to a log.
        return refused.at("an annotation file")
    try:
        with path.open("rb") as stream:
            head = stream.read(max(map(len, _PACKED)))
    except PermissionError as error:
        message = f"it cannot be read: {error.strerror}. Mend its permissions, or leave it out."
        return Problem(str(path), "unreadable_file", message)
    for mark, kind in _PACKED.items():
        if head.startswith(mark):
            return Problem(str(path), "compressed", f"it is compressed ({kind}): unpack it first.")
    return None


def _check_writable(raw: dict[str, Any], text: str) -> None:
    """Refuses what a record file cannot hold.

    Args:
        text: The row as ASCII.
    """
    if "\\ud" in text:
        try:
            json.dumps(raw, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(
                "bad_text", f"half a character stands in it: {error}. Mend or remove the row."
            ) from error
    if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(raw) > _MAX_DEPTH:
        raise Refused(
            "bad_row", f"it is nested more than {_MAX_DEPTH} deep. Mend or remove the row."
        )


def _depth(value: Any) -> int:
    depth, layer = 0, [value]
    while layer:
        depth += 1
        inner = (v.values() if isinstance(v, dict) else v for v in layer)
        layer = [w for values in inner for w in values if isinstance(w, dict | list)]
    return depth


def _unknown(record: Record) -> list[str]:
    unknown = [] if record.media.size else ["width", "height"]
    if record.modality is Modality.VIDEO:
        unknown += [] if record.media.duration_s else ["duration_s"]
        unknown.append("grid")
    return unknown
