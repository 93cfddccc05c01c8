"""Reads back a rollout from a line that ``write_line`` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import cast, get_args

from reframe_vl.rollout.json_field import Field
from reframe_vl.rollout.recorded_media import RecordedImage, RecordedVideo
from reframe_vl.types import (
    Answer,
    AnswerKind,
    Applicability,
    Box,
    CallRecord,
    CallStatus,
    Context,
    Evidence,
    Media,
    Modality,
    Provenance,
    Rollout,
    RolloutKey,
    Sample,
    Sampling,
    Span,
    Termination,
    View,
)

_HASH = re.compile("[0-9a-f]{32}")


def read_rollout(line: Field, view: Callable[[Field], View]) -> Rollout:
    """Reads the rollout of a line.

    Args:
        line: The whole line.
        view: Reads a view: ``read_view``, or what also loads its pixels.

    Raises:
        RecordError: A field is missing or not what it must be.
    """
    key, sampling = line["key"], line["sampling"]

    def contexts(name: str) -> list[Context]:
        read = line[name].each(lambda context: context.each(lambda span: _span(span, view)))
        return [Context(list(spans)) for spans in read]

    return Rollout(
        key=RolloutKey(
            key["seed"].whole(),
            key["step"].whole(),
            key["sample_id"].text(),
            key["index"].whole(),
            key["author"].text() if "author" in key.exactly(dict) else "",
        ),
        contexts=contexts("contexts"),
        branches=contexts("branches"),
        sampling=Sampling(
            temperature=sampling["temperature"].number(),
            max_new_tokens=sampling["max_new_tokens"].whole(),
            banned_ids=_ids(sampling["banned_ids"]),
            stop_ids=_ids(sampling["stop_ids"]),
        ),
        termination=line["termination"].member(Termination),
        drop_assigned=line["drop_assigned"].flag(),
        calls=list(line["calls"].each(_call)),
        answers=list(line["answers"].each(Field.text)),
        num_turns=line["num_turns"].whole(),
        policy_version=line["policy_version"].whole(),
        rewards=line["rewards"].named(Field.optional_number),
        reward=line["reward"].optional_number(),
        advantage=line["advantage"].optional_number(),
        error=line["error"].text(),
    )


def read_sample(field: Field) -> Sample:
    """Reads a sample; its media are a ``RecordedImage`` or a ``RecordedVideo``.

    Raises:
        RecordError: A field is missing or not what it must be.
    """
    answer, modality = field["answer"], field["modality"].member(Modality)
    kind = answer["kind"].text()
    if kind not in get_args(AnswerKind):
        answer["kind"].wrong("one of " + ", ".join(get_args(AnswerKind)))
    return Sample(
        id=field["id"].text(),
        modality=modality,
        media=_media(field["media"], modality),
        question=field["question"].text(),
        answer=Answer(
            # Checked above; the checker cannot follow.
            kind=cast(AnswerKind, kind),
            value=answer["value"].text(),
            aliases=answer["aliases"].each(Field.text),
            tolerance=answer["tolerance"].number(),
        ),
        options=field["options"].each(Field.text),
        evidence=field["evidence"].optional(
            lambda e: Evidence(e["boxes"].each(_box), e["segments"].each(Field.wholes))
        ),
        applicability=field["applicability"].optional(lambda f: f.member(Applicability)),
        domain=field["domain"].text(),
        source=field["source"].text(),
        split=field["split"].text(),
    )


def read_view(field: Field) -> View:
    """Reads a view without its pixels.

    Raises:
        RecordError: A field is missing or not what it must be.
    """
    name = field["hash"].text()
    if not _HASH.fullmatch(name):
        field["hash"].wrong("a hash of 32 hexadecimal digits")
    time, height, width = field["grid_thw"].each(Field.whole, length=3)
    return View(
        None,
        (time, height, width),
        field["num_tokens"].whole(),
        name,
        field["modality"].member(Modality),
        field["patch_seconds"].number(),
    )


def _media(field: Field, modality: Modality) -> Media:
    unreadable = field.value is None
    key = "" if unreadable else field["key"].text()
    width, height = (0, 0) if unreadable else field["size"].each(Field.whole, length=2)
    if modality is Modality.IMAGE:
        return RecordedImage(key, (width, height))
    times = () if unreadable else field["timestamps_s"].each(Field.number)
    return RecordedVideo(key, (width, height), times)


def _call(field: Field) -> CallRecord:
    arguments = field["arguments"]
    if type(arguments.value) is str:
        try:
            arguments = replace(arguments, value=json.loads(arguments.value))
        except ValueError:
            arguments.wrong("an object, or the text of one")
    return CallRecord(
        turn=field["turn"].whole(),
        name=field["name"].text(),
        arguments=arguments.exactly(dict),
        status=field["status"].member(CallStatus),
        boxes=field["boxes"].each(_box),
        frames=field["frames"].wholes(),
        reason=field["reason"].text(),
        coercions=field["coercions"].whole(),
        by_gate=field["by_gate"].flag(),
        proposal=field["proposal"].text(),
    )


def _span(field: Field, view: Callable[[Field], View]) -> Span:
    taught = "teacher_logprobs" in field.exactly(dict)
    return Span(
        provenance=field["provenance"].member(Provenance),
        token_ids=field["token_ids"].wholes(),
        logprobs=field["logprobs"].optional(lambda f: f.each(Field.optional_number)),
        views=field["views"].each(view),
        carried=field["carried"].flag(),
        teacher_logprobs=field["teacher_logprobs"].each(Field.optional_number) if taught else None,
    )


def _box(field: Field) -> Box:
    x0, y0, x1, y1 = field.each(Field.number, length=4)
    return x0, y0, x1, y1


def _ids(field: Field) -> tuple[int, ...]:
    ids: list[int] = []
    for run in field.each(_run):
        ids += run
    return tuple(ids)


def _run(field: Field) -> range:
    if type(field.value) is int:
        return range(field.value, field.value + 1)
    first, last = field.each(Field.whole, length=2)
    return range(first, last + 1)
