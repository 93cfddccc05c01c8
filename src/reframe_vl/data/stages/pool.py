"""Pool: records of all sources in one schema, without doubles and without evaluation media.

The adapters of ``data/sources`` make the records; here they are compared with each other.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from reframe_vl.data.fingerprint import as_words, distances, fingerprint
from reframe_vl.data.media import MediaError
from reframe_vl.data.records import Record
from reframe_vl.data.stages.base import OpenMedia, Outcome, Stage, adapter_of, decided
from reframe_vl.data.stages.held_out import HeldOut, content_key, id_with_folder, media_id
from reframe_vl.rewards.answer import is_right
from reframe_vl.types import Answer

NAME = "pool"
VERSION = "3"

_THREADS = 4
"""Files looked at at once: a large image takes half a GiB while it is decoded."""


@dataclass(frozen=True)
class PoolSettings:
    """How alike two things have to be.

    Attributes:
        max_distance: Bits of 64 by which the hashes of near duplicates differ at most, on average
            over the frames of a video; ours. None compares exact hashes only.
    """

    max_distance: float | None = 4.0


def pool(
    records: Sequence[Record],
    open_media: OpenMedia | None,
    held_out: HeldOut,
    settings: PoolSettings,
    unread: frozenset[str] = frozenset(),
) -> list[Outcome]:
    """Drops evaluation media, and takes fingerprints for ``settle_doubles``.

    Args:
        open_media: None where media are not read: then they are told apart by source and name.
        unread: Adapters whose media are not read although those of others are.
    """
    opens = [None if adapter_of(record.id) in unread else open_media for record in records]
    names = [_name(record, how is not None) for record, how in zip(records, opens, strict=True)]
    by_name = dict(zip(names, zip(records, opens, strict=True), strict=True))
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda pair: _prints(*pair), by_name.values())
        prints = dict(zip(by_name, found, strict=True))
    return [
        _judged(record, prints[name], held_out, settings, is_read=how is not None)
        for record, name, how in zip(records, names, opens, strict=True)
    ]


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
    is_read: bool,
) -> Outcome:
    if isinstance(found, str):
        return decided(record, NAME, "dropped", "media_unreadable", found)
    key, prints = found
    named = _named(record, held_out, is_read)
    if named is not None:
        note = f"{named} is of an evaluation"
        return decided(record, NAME, "dropped", "evaluation_id", note)
    if key in held_out.keys or _is_near(prints, held_out, settings.max_distance):
        note = f"its media {record.media.path} are those of an evaluation"
        return decided(record, NAME, "dropped", "evaluation_media", note)
    if is_right(record.answer.value, Answer(**dict(record.answer)), record.options) is None:
        note = f"the answer {record.answer.value!r} cannot be read as {record.answer.kind}"
        return decided(record, NAME, "dropped", "answer_unreadable", note)
    return Outcome(record, "kept", facts={"key": key, "prints": list(prints)})


def _named(record: Record, held_out: HeldOut, is_read: bool) -> str | None:
    """The name by which a record, or its media, are of an evaluation."""
    if record.id in held_out.ids:
        return record.id
    if not is_read:
        return media_id(record) if media_id(record) in held_out.names else None
    # Files that are both there are compared by what is in them.
    names = (media_id(record), id_with_folder(record))
    return next((name for name in names if name in held_out.missing), None)


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
        num_answers = _num_answers([outcomes[number].record for number in numbers])
        for number in numbers[0 if num_answers > 1 else 1 :]:
            record = outcomes[number].record
            if num_answers > 1:
                note = f"the same is asked of the same media with {num_answers} different answers"
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


def _num_answers(records: Sequence[Record]) -> int:
    """How many different things records answer that ask the same."""
    distinct: list[Record] = []
    for record in {answered(record): record for record in records}.values():
        if not any(_means_the_same(record, other) for other in distinct):
            distinct.append(record)
    return len(distinct)


def _means_the_same(first: Record, second: Record) -> bool:
    """Whether the answer to one is right as an answer to the other, too."""
    if "mcq" in (first.answer.kind, second.answer.kind):
        return answered(first) == answered(second)
    pairs = ((first, second), (second, first))
    return any(is_right(a.answer.value, Answer(**dict(b.answer))) for a, b in pairs)


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    # Signs that change a number stay.
    return " ".join(re.sub(r"[^\w\s.%+-]|[.](?!\d)", " ", folded).split())


def pool_stage(
    open_media: OpenMedia | None,
    held_out: HeldOut,
    settings: PoolSettings,
    unread: frozenset[str],
) -> Stage:
    """The stage, ready to run."""
    read = {"media": open_media is not None, "unread": sorted(unread)}
    return Stage(
        NAME,
        VERSION,
        asdict(settings) | {"held_out": held_out.digest} | read,
        partial(pool, open_media=open_media, held_out=held_out, settings=settings, unread=unread),
        settle=partial(settle_doubles, settings=settings),
    )
