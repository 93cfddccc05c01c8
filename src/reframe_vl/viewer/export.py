"""From rollouts to what the page reads: an index of all, and the details of some at a time.

The page opens with the index alone, a column a field; a block of details is unpacked when one of
its rollouts is looked at. Everything is packed to base64, in which no text can end an element.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reframe_vl.rollout.json_field import NOT_FINITE
from reframe_vl.rollout.read_line import read_sample
from reframe_vl.types import CallStatus, Span, Termination
from reframe_vl.viewer.pictures import Pictures
from reframe_vl.viewer.pieces import Splitter
from reframe_vl.viewer.reading import Entry, Run

_JS_NUMBERS = dict(zip(NOT_FINITE, ("NaN", "Infinity", "-Infinity"), strict=True))
_BLOCK_ROLLOUTS = 64
_BLOCK_CHARACTERS = 400_000
_IMAGES_OF_A_BLOCK = 128
_DIGITS = 6
_PREVIEW = 60


@dataclass(frozen=True)
class Export:
    """What goes into a page.

    Attributes:
        index: Packed; everything that lists and filters need.
        details: Packed blocks.
        images: Blocks of lines of ``Pictures``.
        num_rollouts: In all.
    """

    index: str
    details: list[str]
    images: list[str]
    num_rollouts: int


@dataclass
class _Details:
    """Blocks of details that are filled one after the other."""

    packed: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)
    _characters: int = 0
    _count: int = 0

    def add(self, rollout: dict[str, Any]) -> None:
        text = _json(rollout)
        if not self._open:
            self.firsts.append(self._count)
        self._open.append(text)
        self._count += 1
        self._characters += len(text)
        if len(self._open) == _BLOCK_ROLLOUTS or self._characters > _BLOCK_CHARACTERS:
            self.close()

    def close(self) -> None:
        if self._open:
            self.packed.append(_pack(f"[{','.join(self._open)}]"))
        self._open, self._characters = [], 0


def export(
    runs: Sequence[Run],
    found: Iterable[Entry],
    splitters: Sequence[Splitter | None],
    pictures: Pictures,
) -> Export:
    """Reads all entries once.

    Args:
        runs: Those that the entries number.
        found: What is shown.
        splitters: One a run; None shows its turns without single tokens.
        pictures: Takes the images.
    """
    samples: dict[str, int] = {}
    details = _Details()
    rows: list[dict[str, Any]] = []
    factors: dict[tuple[int, int], dict[str, float] | None] = {}
    for entry in found:
        sample = _json(entry.line["sample"].value)
        if sample not in samples:
            read_sample(entry.line["sample"])
        rows.append(_row(entry, samples.setdefault(sample, len(samples))))
        details.add(_detail(entry, splitters[entry.run], pictures))
        at = (entry.run, entry.step)
        if at not in factors:
            factors[at] = runs[entry.run].factors(entry.step)
    details.close()
    index = {
        "runs": [
            {
                "name": run.name,
                "factors": {str(step): f for (r, step), f in factors.items() if r == number and f},
            }
            for number, run in enumerate(runs)
        ],
        "terminations": [termination.value for termination in Termination],
        "columns": {name: [row[name] for row in rows] for name in rows[0]} if rows else {},
        "firsts": details.firsts,
        "imagesOfABlock": _IMAGES_OF_A_BLOCK,
    }
    # Samples are JSON already.
    text = f'{_json(index)[:-1]},"samples":[{",".join(samples)}]}}'
    lines = pictures.lines
    images = [
        "\n".join(lines[start : start + _IMAGES_OF_A_BLOCK])
        for start in range(0, len(lines), _IMAGES_OF_A_BLOCK)
    ]
    return Export(_pack(text), details.packed, images, len(rows))


def _row(entry: Entry, sample: int) -> dict[str, Any]:
    """A rollout in the index."""
    line, rollout = entry.line.value, entry.rollout
    gated = sum(call.status is CallStatus.REPLACED for call in rollout.calls)
    answer = rollout.answers[0] if rollout.answers else None
    return {
        "run": entry.run,
        "step": entry.step,
        "group": line["group"],
        "index": rollout.key.index,
        "sample": sample,
        "termination": list(Termination).index(rollout.termination),
        "assigned": int(rollout.drop_assigned),
        "dropped": int(rollout.dropped),
        "gated": gated + len(rollout.branches),
        "reward": _number(rollout.reward),
        "advantage": _number(rollout.advantage),
        "right": _number(rollout.rewards.get("answer")),
        "calls": len(rollout.calls),
        "turns": rollout.num_turns,
        "tokens": rollout.num_sampled,
        "answer": None if answer is None else answer[:_PREVIEW],
    }


def _detail(entry: Entry, splitter: Splitter | None, pictures: Pictures) -> dict[str, Any]:
    """A rollout as it is looked at."""
    line, rollout = entry.line.value, entry.rollout
    return {
        "seed": str(rollout.key.seed),
        "version": rollout.policy_version,
        "temperature": _number(rollout.sampling.temperature),
        "rewards": {name: _number(value) for name, value in rollout.rewards.items()},
        "answers": rollout.answers,
        "error": rollout.error,
        "calls": [
            {name: value for name, value in call.items() if name != "coercions"}
            for call in line["calls"]
        ],
        **{
            kind: [
                [
                    _span(span, str(fields.get("text", "")), entry, splitter, pictures)
                    for span, fields in zip(context.spans, written, strict=True)
                ]
                for context, written in zip(contexts, line[kind], strict=True)
            ]
            for kind, contexts in (("contexts", rollout.contexts), ("branches", rollout.branches))
        },
    }


def _span(
    span: Span, text: str, entry: Entry, splitter: Splitter | None, pictures: Pictures
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "by": span.provenance.value,
        "text": text,
        "tokens": len(span.token_ids),
    }
    if span.carried:
        fields["carried"] = True
    if span.views:
        fields["views"] = [pictures.add(view, entry.file) for view in span.views]
        fields["visual"] = span.num_visual_tokens
    if span.trained:
        pieces = splitter.split(span.token_ids, text) if splitter else None
        if pieces is not None:
            fields["pieces"] = pieces
            fields["ids"] = span.token_ids
        if span.logprobs is not None:
            fields["logprobs"] = [_number(value) for value in span.logprobs]
        if span.teacher_logprobs is not None:
            fields["teacher"] = [_number(value) for value in span.teacher_logprobs]
    return fields


def _number(value: float | None) -> float | str | None:
    """Six digits are more than are shown; what JSON does not have, JavaScript reads as text."""
    if value is None:
        return None
    if not math.isfinite(value):
        return _JS_NUMBERS[str(float(value))]
    return float(f"{value:.{_DIGITS}g}")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _pack(text: str) -> str:
    # Without the time: the same rollouts give the same page.
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
