"""Writes a rollout as one line of strict JSON; ``read_line`` is the way back.

A line holds everything about its rollout but the pixels, which are files of their own:

- Numbers that JSON does not have are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
- ``banned_ids`` and ``stop_ids`` are lists of ids and of ``[first, last]`` runs.
- ``text`` of a span is for people; reading leaves it alone.
- ``teacher_logprobs`` of a span stands only where a teacher was asked.
- Only ASCII is written: what a model wrote may hold anything, lone surrogates included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from reframe_vl.data.media import MediaError
from reframe_vl.types import CallRecord, Context, Media, Rollout, Sample, Span, VideoMedia

_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def to_line(
    group: int, sample: dict[str, Any], rollout: Rollout, decode: Callable[[tuple[int, ...]], str]
) -> str:
    """Writes a rollout.

    Args:
        group: Place of its group in the step: rollouts of a group have the same.
        sample: The group's ``sample_fields``.
        rollout: What is written.
        decode: From token ids to the text that people read.
    """
    key, sampling = rollout.key, rollout.sampling
    return _JSON.encode(
        {
            "group": group,
            "key": {
                "seed": key.seed,
                "step": key.step,
                "sample_id": key.sample_id,
                "index": key.index,
                **({"author": key.author} if key.author else {}),
            },
            "termination": rollout.termination,
            "answers": rollout.answers,
            "reward": _number(rollout.reward),
            "rewards": {name: _number(value) for name, value in rollout.rewards.items()},
            "advantage": _number(rollout.advantage),
            "drop_assigned": rollout.drop_assigned,
            "num_turns": rollout.num_turns,
            "policy_version": rollout.policy_version,
            "error": rollout.error,
            "sample": sample,
            "calls": [_call_fields(call) for call in rollout.calls],
            "contexts": _contexts(rollout.contexts, decode),
            "branches": _contexts(rollout.branches, decode),
            "sampling": {
                "temperature": _number(sampling.temperature),
                "max_new_tokens": sampling.max_new_tokens,
                "banned_ids": _runs(sampling.banned_ids),
                "stop_ids": _runs(sampling.stop_ids),
            },
        }
    )


def sample_fields(sample: Sample) -> dict[str, Any]:
    """What is written of a sample: all but its media, of which key, size and times."""
    answer, evidence = sample.answer, sample.evidence
    return {
        "id": sample.id,
        "modality": sample.modality,
        "domain": sample.domain,
        "source": sample.source,
        "split": sample.split,
        "question": sample.question,
        "options": sample.options,
        "answer": {
            "kind": answer.kind,
            "value": answer.value,
            "aliases": answer.aliases,
            "tolerance": _number(answer.tolerance),
        },
        "evidence": None
        if evidence is None
        else {"boxes": list(map(_numbers, evidence.boxes)), "segments": evidence.segments},
        "applicability": sample.applicability,
        "media": _media_fields(sample.media),
    }


def _media_fields(media: Media) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = {"key": media.key, "size": media.size}
        if isinstance(media, VideoMedia):
            fields["timestamps_s"] = _numbers(media.timestamps_s)
    except (MediaError, OSError):
        # The rollouts of such a sample ended in ERROR and say why; the record is to be kept.
        return None
    return fields


def _call_fields(call: CallRecord) -> dict[str, Any]:
    arguments: dict[str, Any] | str = call.arguments
    try:
        _JSON.encode(arguments)
    except ValueError:
        # A text in place of an object cannot be taken for anything that a model wrote.
        arguments = json.dumps(arguments)
    return {
        "turn": call.turn,
        "name": call.name,
        "arguments": arguments,
        "status": call.status,
        "reason": call.reason,
        "boxes": list(map(_numbers, call.boxes)),
        "frames": call.frames,
        "coercions": call.coercions,
        "by_gate": call.by_gate,
        "proposal": call.proposal,
    }


def _contexts(
    contexts: Sequence[Context], decode: Callable[[tuple[int, ...]], str]
) -> list[list[dict[str, Any]]]:
    return [[_span_fields(span, decode) for span in context.spans] for context in contexts]


def _span_fields(span: Span, decode: Callable[[tuple[int, ...]], str]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "provenance": span.provenance,
        "carried": span.carried,
        "text": decode(span.token_ids),
        "token_ids": span.token_ids,
        "logprobs": None if span.logprobs is None else _numbers(span.logprobs),
        "views": [
            {
                "hash": view.hash,
                "modality": view.modality,
                "grid_thw": view.grid_thw,
                "num_tokens": view.num_tokens,
                "patch_seconds": view.patch_seconds,
            }
            for view in span.views
        ],
    }
    if span.teacher_logprobs is not None:
        fields["teacher_logprobs"] = _numbers(span.teacher_logprobs)
    return fields


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _numbers(values: Iterable[float | None]) -> list[float | str | None]:
    return [_number(value) for value in values]


# The rollouts of a step share their sampling.
@lru_cache(maxsize=64)
def _runs(ids: tuple[int, ...]) -> list[int | list[int]]:
    """Shortens ascending ids without a gap; the order of all others stays."""
    runs: list[list[int]] = []
    for value in ids:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return [first if first == last else [first, last] for first, last in runs]
