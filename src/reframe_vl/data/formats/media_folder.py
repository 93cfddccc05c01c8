"""Finds the media that annotations name, and adds to records what only the files tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from reframe_vl.data.formats.media_facts import MediaFacts
from reframe_vl.data.formats.media_search import VIDEO_SUFFIXES, MediaSearch
from reframe_vl.data.formats.rows import Refused
from reframe_vl.data.formats.windows import duration_notes, end_notes
from reframe_vl.data.media import ImageFile, MediaError
from reframe_vl.data.record_parts import AuditEntry, MediaInfo
from reframe_vl.data.records import Record
from reframe_vl.data.validation import segment_problem, size_problem
from reframe_vl.data.video import GridRule
from reframe_vl.data.video_records import video_info
from reframe_vl.types import Modality

_VIDEO_SUFFIX = ".mp4"


def media_name(name: str) -> str:
    """The name of a media file as a relative path.

    Raises:
        Refused: It names no file.
    """
    if not name.strip():
        raise Refused("media_missing", "the row names no media file. Name it, or leave it out.")
    return name


def video_name(name: str) -> str:
    """The name of a video that a row names with its suffix or without.

    Raises:
        Refused: It names no file.
    """
    is_whole = PurePosixPath(media_name(name)).suffix.lower() in VIDEO_SUFFIXES
    return name if is_whole else name + _VIDEO_SUFFIX


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
        info, notes = self._info(record.media.path, record.modality)
        stated = record.media
        if stated.size is not None and info.size is not None and stated.size != info.size:
            raise Refused(*size_problem(stated.size, info.size))
        for segment in record.segments:
            odd = segment_problem(segment, info.duration_s)
            if odd is not None:
                raise Refused(*odd)
            if stated.duration_s is None:
                notes += end_notes(segment, info.duration_s, "is")
        notes += duration_notes(stated.duration_s, info.duration_s, "listed, decoded")
        return record.model_copy(update={"media": info, "audit": (*record.audit, *notes)})

    def image_size(self, name: str) -> tuple[int, int] | None:
        """The size of an image.

        Raises:
            Refused: It is not there or cannot be read.
        """
        return self._info(name, Modality.IMAGE)[0].size

    @cached_property
    def _search(self) -> MediaSearch:
        return MediaSearch(self.folder)

    def _info(self, name: str, modality: Modality) -> tuple[MediaInfo, list[AuditEntry]]:
        path, notes = self._search.find(name, modality)
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
        return self._infos[path], notes


def _read(path: Path, modality: Modality, rule: GridRule) -> MediaInfo:
    if modality is Modality.VIDEO:
        return video_info(path, rule)
    image = ImageFile(path)
    image.look(None, 1)  # Truncated files have a good header.
    width, height = image.size
    return MediaInfo(path=str(path), width=width, height=height)
