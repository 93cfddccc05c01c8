"""Finds the media that annotations name, and adds to records what only the files tell."""

from __future__ import annotations

import os
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from reframe_vl.data.formats.media_facts import MediaFacts
from reframe_vl.data.formats.rows import Refused
from reframe_vl.data.formats.windows import duration_notes
from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.record_parts import MediaInfo
from reframe_vl.data.records import Record
from reframe_vl.data.validation import segment_problem, size_problem
from reframe_vl.data.video import GridRule
from reframe_vl.data.video_records import video_info
from reframe_vl.types import Modality

VIDEO_SUFFIXES = frozenset(
    (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".flv", ".ts", ".3gp")
)


def media_name(name: str) -> str:
    """The name of a media file as a relative path.

    Raises:
        Refused: It names no file.
    """
    if not name.strip():
        raise Refused("media_missing", "the row names no media file. Name it, or leave it out.")
    return name


@dataclass(frozen=True)
class MediaFolder:
    """A folder of media files; each file is read once.

    Attributes:
        rule: Lays the grids of videos.
        facts: Keeps what was read for other runs; None keeps it for this one.
    """

    folder: Path
    rule: GridRule
    facts: MediaFacts | None = None
    _infos: dict[Path, MediaInfo] = field(default_factory=dict)

    def attach(self, record: Record) -> Record:
        """Names the file of a record's media and adds its size, and of a video its grid.

        Raises:
            Refused: The file is not there, cannot be read, or is not the one that is described.
        """
        info = self._info(record.media.path, record.modality)
        stated = record.media
        if stated.size is not None and info.size is not None and stated.size != info.size:
            raise Refused(*size_problem(stated.size, info.size))
        for segment in record.segments:
            odd = segment_problem(segment, info.duration_s)
            if odd is not None:
                raise Refused(*odd)
        notes = duration_notes(stated.duration_s, info.duration_s, "listed, decoded")
        return record.model_copy(update={"media": info, "audit": (*record.audit, *notes)})

    def image_size(self, name: str) -> tuple[int, int] | None:
        """The size of an image.

        Raises:
            Refused: It is not there or cannot be read.
        """
        return self._info(name, Modality.IMAGE).size

    def _info(self, name: str, modality: Modality) -> MediaInfo:
        path = self._find(name, modality)
        if path not in self._infos:
            info = self.facts.get(path, modality, self.rule) if self.facts else None
            if info is None:
                try:
                    info = _read(path, modality, self.rule)
                except MediaError as error:
                    raise Refused("media_unreadable", str(error)) from error
                if self.facts is not None:
                    self.facts.put(path, modality, self.rule, info)
            self._infos[path] = info
        return self._infos[path]

    def _find(self, name: str, modality: Modality) -> Path:
        named = PurePosixPath(name.replace("\\", "/"))
        # A row may name a path of the machine that it was written on, or one outside the folder.
        if named.is_absolute() or ".." in named.parts:
            named = PurePosixPath(named.name)
        path = self.folder / named
        # Unlike Path.is_file, this is no error for a name that no file can have.
        if os.path.isfile(path):
            return path.absolute()
        found = self._by_name.get(_composed(named.name), [])
        if not found and modality is Modality.VIDEO:
            stem = named.stem if named.suffix in VIDEO_SUFFIXES else named.name
            found = self._videos_by_stem.get(_composed(stem), [])
        if not found:
            raise Refused(
                "media_missing",
                f"the file {path} is not there, nor anywhere else in {self.folder}. Fetch it, or "
                "check the folder given as media=.",
            )
        if len(found) > 1:
            raise Refused(
                "media_ambiguous",
                f"{self.folder} holds several files {name!r}, such as {found[0]} and {found[1]}. "
                "Give the folder of the right one.",
            )
        return found[0].absolute()

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for folder, _, names in os.walk(self.folder):
            for name in names:
                found[_composed(name)].append(Path(folder, name))
        return dict(found)

    @cached_property
    def _videos_by_stem(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for paths in self._by_name.values():
            for path in paths:
                if path.suffix.lower() in VIDEO_SUFFIXES:
                    found[_composed(path.stem)].append(path)
        return dict(found)


def _composed(name: str) -> str:
    """Archives made on a Mac write an accent as a letter of its own."""
    return unicodedata.normalize("NFC", name)


def _read(path: Path, modality: Modality, rule: GridRule) -> MediaInfo:
    if modality is Modality.VIDEO:
        return video_info(path, rule)
    image = ImageFile(path)
    image.look(None, 1)  # Truncated files have a good header.
    width, height = image.size
    return MediaInfo(path=str(path), width=width, height=height)
