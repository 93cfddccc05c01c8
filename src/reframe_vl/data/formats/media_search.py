"""Finds the file that a row names in a folder of media, wherever below it lies."""

from __future__ import annotations

import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

from reframe_vl.data.formats.rows import Refused, check_path, kept
from reframe_vl.data.record_parts import AuditEntry
from reframe_vl.types import Modality

VIDEO_SUFFIXES = frozenset(
    (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".flv", ".ts", ".3gp")
)
_JPEG_SUFFIXES = frozenset((".jpg", ".jpeg"))
_SUFFIXES = {
    Modality.VIDEO: VIDEO_SUFFIXES,
    Modality.IMAGE: _JPEG_SUFFIXES | {".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"},
}


class MediaSearch:
    """The files below a folder; they are listed once, when a row's own path leads to none.

    Args:
        folder: Folders that it links to are searched too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str, modality: Modality) -> tuple[Path, list[AuditEntry]]:
        """The file that a row names, and what is odd about it.

        A row may name a path of the machine that it was written on, or leave out folders: then the
        file is taken whose path agrees with it in the most parts, counted from the end.

        Raises:
            Refused: There is none, or several agree as well.
        """
        named = self._named(name)
        path = self.folder / named
        # Unlike Path.is_file, this is no error for a name that no file can have.
        if os.path.isfile(path):
            return check_path(path.absolute()), []
        found = self._by_name.get(_composed(named.name), [])
        notes: list[AuditEntry] = []
        if not found:
            found = self._with_other_suffix(named, modality)
            notes += _suffix_notes(named, found, modality)
        if not found:
            raise Refused(
                "media_missing",
                f"the file {path} is not there, nor anywhere else in {self.folder}. Fetch it, or "
                "check the folder given as media=.",
            )
        best = self._best(named, name, found)
        return check_path(best.absolute()), notes + self._folder_notes(named, name, best)

    def _named(self, name: str) -> PurePosixPath:
        """The part of a row's path that may be one below the folder."""
        named = PurePosixPath(name.replace("\\", "/"))
        for folder in self._own_paths:
            if named.is_relative_to(folder) and ".." not in named.parts:
                return named.relative_to(folder)
        parts = [part for part in named.parts if part not in ("/", "//")]
        if ".." in parts:
            parts = parts[len(parts) - parts[::-1].index("..") :]
        return PurePosixPath(*parts)

    def _best(self, named: PurePosixPath, name: str, found: list[Path]) -> Path:
        """The file that agrees in the most folders."""
        shared = [_shared_folders(named, path) for path in found]
        best = [path for path, n in zip(found, shared, strict=True) if n == max(shared)]
        if len(best) > 1:
            raise Refused(
                "media_ambiguous",
                f"{self.folder} holds several files {name!r}, such as {best[0]} and {best[1]}. "
                "Give the folder of the right one.",
            )
        return best[0]

    def _folder_notes(self, named: PurePosixPath, name: str, best: Path) -> list[AuditEntry]:
        """Says that a file lies below the folder in another one than the row names.

        Raises:
            Refused: The folder that the row names is there too, so that it is another file.
        """
        shared = _shared_folders(named, best)
        left = named.parent.parts[: len(named.parent.parts) - shared]
        if not left or shared >= len(best.relative_to(self.folder).parent.parts):
            return []
        if _composed(left[-1]) in self._folders:
            raise Refused(
                "media_missing",
                f"the file {name!r} is not there, but its folder {left[-1]!r} is, so that {best} "
                "is another file. Fetch the right one, or leave the row out.",
            )
        return [
            kept("media_elsewhere", f"the file {name!r} was found in another folder, as {best}")
        ]

    def _with_other_suffix(self, named: PurePosixPath, modality: Modality) -> list[Path]:
        suffixes = _SUFFIXES[modality]
        stem = named.name
        while True:
            found = self._by_stem.get(_composed(stem), [])
            found = [path for path in found if path.suffix.lower() in suffixes]
            found = [path for path in found if _is_alike(named, path)] or found
            shorter, suffix = os.path.splitext(stem)
            if found or suffix.lower() not in suffixes:
                return found
            stem = shorter

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for path in self._files:
            found[_composed(path.name)].append(path)
        return dict(found)

    @cached_property
    def _by_stem(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for path in self._files:
            found[_composed(path.stem)].append(path)
        return dict(found)

    @cached_property
    def _folders(self) -> set[str]:
        """The names of the folders below that hold a file, and of those above them."""
        parents = {path.parent.relative_to(self.folder) for path in self._files}
        return {_composed(part) for parent in parents for part in parent.parts}

    @cached_property
    def _own_paths(self) -> tuple[str, str]:
        return os.path.abspath(self.folder), os.path.realpath(self.folder)

    @cached_property
    def _files(self) -> list[Path]:
        return list(_files(self.folder))


def _files(folder: Path) -> Iterator[Path]:
    """The regular files below a folder; each folder once, also where links lead to it."""
    seen: set[tuple[int, int]] = set()
    waiting, linked = [folder], list[Path]()
    while waiting or linked:
        # Links come last: a folder is then named by its own path where it has one below.
        here = waiting.pop() if waiting else linked.pop(0)
        try:
            known = os.stat(here)
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        if (known.st_dev, known.st_ino) in seen:
            continue
        seen.add((known.st_dev, known.st_ino))
        for entry in entries:
            if entry.is_file():
                yield Path(entry.path)
            elif entry.is_dir():
                (linked if entry.is_symlink() else waiting).append(Path(entry.path))


def _shared_folders(named: PurePosixPath, path: Path) -> int:
    """How many folders of both, counted from the file upwards, have the same names."""
    pairs = zip(named.parent.parts[::-1], path.absolute().parent.parts[::-1], strict=False)
    count = 0
    for one, other in pairs:
        if _composed(one) != _composed(other):
            break
        count += 1
    return count


def _is_alike(named: PurePosixPath, path: Path) -> bool:
    """Whether two names say the same kind of file."""
    suffixes = {named.suffix.lower(), path.suffix.lower()}
    return len(suffixes) == 1 or suffixes <= _JPEG_SUFFIXES


def _suffix_notes(named: PurePosixPath, found: list[Path], modality: Modality) -> list[AuditEntry]:
    """A mask often has the name of its image, but for the suffix; a video has no such double."""
    named_suffix = named.suffix.lower() in _SUFFIXES[modality]
    if modality is Modality.VIDEO or not named_suffix or all(_is_alike(named, p) for p in found):
        return []
    note = f"the file {named.name!r} was found with another suffix, such as {found[0].name!r}"
    return [kept("media_other_suffix", note)]


def _composed(name: str) -> str:
    """Archives made on a Mac write an accent as a letter of its own."""
    return unicodedata.normalize("NFC", name)
