"""Pool: records of all sources in one schema, without doubles and without evaluation media.

The adapters of ``data/sources`` make the records; here they are compared with each other.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reframe_vl.data.fingerprint import as_words, distances, fingerprint
from reframe_vl.data.media import MediaError, file_key
from reframe_vl.data.records import Record, read_records
from reframe_vl.data.stages.base import OpenMedia, Outcome, Stage, decided, open_file
from reframe_vl.rewards.answer import is_right
from reframe_vl.types import Answer, Media

NAME = "pool"
VERSION = "2"


@dataclass(frozen=True)
class PoolSettings:
    """How alike two things have to be.

    Attributes:
        max_distance: Bits of 64 by which the hashes of near duplicates differ at most, on average
            over the frames of a video; ours. None compares exact hashes only.
    """

    max_distance: float | None = 4.0


@dataclass(frozen=True)
class HeldOut:
    """The media of evaluations, which never become training data.

    Attributes:
        keys: Hashes of their files, as of ``Media.key``.
        ids: Of records; and of media, as ``media_id``.
        prints: Fingerprints, to find copies that were encoded anew.
    """

    keys: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    prints: tuple[tuple[str, ...], ...] = ()

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
        text = repr((sorted(self.keys), sorted(self.ids), sorted(self.prints)))
        return hashlib.sha256(text.encode()).hexdigest()


def held_out_of(records: Iterable[Record], open_media: OpenMedia) -> HeldOut:
    """The media of evaluation records; a file that is not there is known by its name alone.

    Raises:
        MediaError: A file is there and cannot be read.
    """
    keys, ids, prints = set(), set(), set()
    for record in records:
        ids |= {record.id, media_id(record)}
        try:
            media = open_media(record)
            keys.add(content_key(media))
            prints.add(fingerprint(media))
        except MediaError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return HeldOut(frozenset(keys), frozenset(ids), tuple(sorted(prints)))


def read_held_out(paths: Sequence[Path]) -> HeldOut:
    """The media of the record files of evaluations.

    Raises:
        FileNotFoundError: A record file is not there.
        MediaError: A media file is there and cannot be read.
    """
    keys: set[str] = set()
    ids: set[str] = set()
    prints: set[tuple[str, ...]] = set()
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"held_out={path} is not there: give a record file of an evaluation."
            )
        found = held_out_of(read_records(path), partial(open_file, root=path.absolute().parent))
        keys, ids, prints = keys | found.keys, ids | found.ids, prints | set(found.prints)
    return HeldOut(frozenset(keys), frozenset(ids), tuple(sorted(prints)))


def media_id(record: Record) -> str:
    """What a source calls the media: names of files alone recur from source to source."""
    return f"{record.source}/{Path(record.media.path).stem}"


def content_key(media: Media) -> str:
    """Names the content of media; of a video whatever its grid."""
    path = getattr(media, "path", None)
    return file_key(path) if isinstance(path, Path) else media.key


def pool(
    records: Sequence[Record],
    open_media: OpenMedia | None,
    held_out: HeldOut,
    settings: PoolSettings,
) -> list[Outcome]:
    """Drops evaluation media, and takes fingerprints for ``settle_doubles``.

    Args:
        open_media: None where media are not read: then they are told apart by source and name.
    """
    names = [_name(record, open_media is not None) for record in records]
    by_name = dict(zip(names, records, strict=True))
    with ThreadPoolExecutor() as threads:
        found = threads.map(partial(_prints, open_media=open_media), by_name.values())
        prints = dict(zip(by_name, found, strict=True))
    pairs = zip(names, records, strict=True)
    return [_judged(record, prints[name], held_out, settings) for name, record in pairs]


def _name(record: Record, is_file: bool) -> str:
    """What tells media apart: equal names of two sources are one thing only where files are."""
    return record.media.path if is_file else f"{record.source}/{record.media.path}"


def _prints(record: Record, open_media: OpenMedia | None) -> tuple[str, tuple[str, ...]] | str:
    """(key, fingerprint) of a record's media, or what is wrong with them."""
    if open_media is None:
        return _name(record, is_file=False), ()
    try:
        media = open_media(record)
        return content_key(media), fingerprint(media)
    except MediaError as error:
        return str(error)


def _judged(
    record: Record,
    found: tuple[str, tuple[str, ...]] | str,
    held_out: HeldOut,
    settings: PoolSettings,
) -> Outcome:
    if isinstance(found, str):
        return decided(record, NAME, "dropped", "media_unreadable", found)
    key, prints = found
    named = {record.id, media_id(record)} & held_out.ids
    if named:
        note = f"{named.pop()} is of an evaluation"
        return decided(record, NAME, "dropped", "evaluation_id", note)
    if key in held_out.keys or _is_near(prints, held_out, settings.max_distance):
        note = f"its media {record.media.path} are those of an evaluation"
        return decided(record, NAME, "dropped", "evaluation_media", note)
    if is_right(record.answer.value, Answer(**dict(record.answer)), record.options) is None:
        note = f"the answer {record.answer.value!r} cannot be read as {record.answer.kind}"
        return decided(record, NAME, "dropped", "answer_unreadable", note)
    return Outcome(record, "kept", facts={"key": key, "prints": list(prints)})


def _is_near(prints: tuple[str, ...], held_out: HeldOut, max_distance: float | None) -> bool:
    words = held_out.words.get(len(prints))
    if max_distance is None or words is None:
        return False
    return bool((distances(as_words(prints), words) <= max_distance).any())


def settle_doubles(outcomes: Sequence[Outcome], settings: PoolSettings) -> dict[int, Outcome]:
    """Finds records that ask the same of the same media.

    Of those with the same answer the first stays; where the media are the very same and the answers
    differ, none does. Near media count only where the answers are the same too: two shots of a
    scene may well differ in what is asked.
    """
    settled: dict[int, Outcome] = {}
    kept = {n: outcome for n, outcome in enumerate(outcomes) if outcome.verdict != "dropped"}
    exact: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, outcome in kept.items():
        exact[outcome.facts["key"], asked(outcome.record)].append(number)
    for numbers in exact.values():
        first = outcomes[numbers[0]].record
        answers = {answered(outcomes[number].record) for number in numbers}
        for number in numbers[0 if len(answers) > 1 else 1 :]:
            record = outcomes[number].record
            if len(answers) > 1:
                note = f"the same is asked of the same media with {len(answers)} different answers"
                settled[number] = decided(record, NAME, "dropped", "answers_disagree", note)
            else:
                note = f"{first.id} asks the same of the same media"
                settled[number] = decided(record, NAME, "dropped", "duplicate", note)
    near: dict[tuple[str | int, ...], list[int]] = defaultdict(list)
    for number, outcome in kept.items():
        prints = outcome.facts["prints"]
        if number not in settled and prints and settings.max_distance is not None:
            near[len(prints), asked(outcome.record), answered(outcome.record)].append(number)
    for numbers in near.values():
        if len(numbers) == 1:
            continue
        words = np.stack([as_words(tuple(outcomes[n].facts["prints"])) for n in numbers])
        stay = np.ones(len(numbers), bool)
        for later in range(1, len(numbers)):
            close = distances(words[later], words[:later]) <= (settings.max_distance or 0)
            if not (close & stay[:later]).any():
                continue
            stay[later] = False
            first = outcomes[numbers[int(np.flatnonzero(close & stay[:later])[0])]].record
            note = f"{first.id} asks the same of media that look the same"
            record = outcomes[numbers[later]].record
            settled[numbers[later]] = decided(record, NAME, "dropped", "near_duplicate", note)
    return settled


def asked(record: Record) -> str:
    """What a record asks, whatever the letter case, the punctuation and the order of options."""
    return "\0".join((_plain(record.question), *sorted(map(_plain, record.options))))


def answered(record: Record) -> str:
    """What a record answers; of a multiple choice the option's text."""
    value = record.answer.value
    if record.answer.kind == "mcq":
        value = record.options[ord(value) - ord("A")]
    return _plain(value)


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    # Signs that change a number stay.
    return " ".join(re.sub(r"[^\w\s.%+-]|[.](?!\d)", " ", folded).split())


def pool_stage(
    open_media: OpenMedia | None,
    held_out: HeldOut = HeldOut(),
    settings: PoolSettings = PoolSettings(),
) -> Stage:
    """The stage, ready to run."""
    return Stage(
        NAME,
        VERSION,
        asdict(settings) | {"held_out": held_out.digest, "media": open_media is not None},
        partial(pool, open_media=open_media, held_out=held_out, settings=settings),
        settle=partial(settle_doubles, settings=settings),
    )
