"""The media of evaluations, which never become training data."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from reframe_vl.data.fingerprint import as_words, fingerprint
from reframe_vl.data.media import MediaError, file_key
from reframe_vl.data.records import Record, read_records
from reframe_vl.data.stages.base import OpenMedia, open_file
from reframe_vl.types import Media

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """The media of evaluations, which never become training data.

    Attributes:
        keys: Hashes of their files, as of ``Media.key``.
        ids: Of records.
        prints: Fingerprints, to find copies that were encoded anew.
        names: Of all media, as ``media_id``; for training media that are not read.
        missing: Of the media whose files are not there, with their folder where it is known; for
            training media that are read.
    """

    keys: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    prints: tuple[tuple[str, ...], ...] = ()
    names: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()

    @cached_property
    def words(self) -> dict[int, npt.NDArray[np.uint64]]:
        """The fingerprints as numbers, by their number of frames."""
        by_length: dict[int, list[npt.NDArray[np.uint64]]] = defaultdict(list)
        for prints in self.prints:
            by_length[len(prints)].append(as_words(prints))
        return {length: np.stack(words) for length, words in by_length.items()}

    @property
    def digest(self) -> str:
        """Equal for equal contents."""
        sets = (self.keys, self.ids, self.prints, self.names, self.missing)
        return hashlib.sha256(repr([sorted(part) for part in sets]).encode()).hexdigest()

    def __or__(self, other: HeldOut) -> HeldOut:
        """The media of both."""
        return HeldOut(
            self.keys | other.keys,
            self.ids | other.ids,
            tuple(sorted({*self.prints, *other.prints})),
            self.names | other.names,
            self.missing | other.missing,
        )


def held_out_of(
    records: Iterable[Record], open_media: OpenMedia, where: str = "the evaluation"
) -> HeldOut:
    """The media of evaluation records; a file that is not there is known by its name alone.

    Args:
        where: How a warning names the records.

    Raises:
        MediaError: A file is there and cannot be read.
    """
    keys, ids, prints, names, missing = set(), set(), set(), set(), set()
    seen: set[str] = set()
    gone: list[str] = []
    for record in records:
        ids.add(record.id)
        names.add(media_id(record))
        if record.media.path in seen:
            continue
        seen.add(record.media.path)
        try:
            media = open_media(record)
            keys.add(content_key(media))
            prints.add(fingerprint(media))
        except MediaError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            gone.append(record.media.path)
            missing.add(id_with_folder(record))
    if gone:
        logger.warning(
            "%s: %d of %d media are not there, such as %s. They are known by source and name "
            "alone: copies under other names are not kept out. Put them back, or build the file "
            "again.",
            where,
            len(gone),
            len(seen),
            gone[0],
        )
    return HeldOut(
        keys=frozenset(keys),
        ids=frozenset(ids),
        prints=tuple(sorted(prints)),
        names=frozenset(names),
        missing=frozenset(missing),
    )


def read_held_out(paths: Sequence[Path]) -> HeldOut:
    """The media of the record files of evaluations.

    Raises:
        FileNotFoundError: A record file is not there.
        MediaError: A media file is there and cannot be read.
    """
    held_out = HeldOut()
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"held_out={path} is not there: give a record file of an evaluation."
            )
        opened = partial(open_file, root=path.absolute().parent)
        held_out |= held_out_of(read_records(path), opened, f"held_out={path}")
    return held_out


def media_id(record: Record) -> str:
    """What a source calls the media: names of files alone recur from source to source."""
    return f"{record.source}/{Path(record.media.path).stem}"


def id_with_folder(record: Record) -> str:
    """As ``media_id``, with the folder, since one source may have A/1.png and B/1.png."""
    path = PurePosixPath(record.media.path)
    return "/".join((record.source, *filter(None, (path.parent.name, path.stem))))


def content_key(media: Media) -> str:
    """Names the content of media; of a video whatever its grid."""
    path = getattr(media, "path", None)
    return file_key(path) if isinstance(path, Path) else media.key
