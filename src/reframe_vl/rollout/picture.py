"""A rollout as a picture: where it looked, what it got to see, what the evidence is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from reframe_vl.rollout.canvas import (
    MARGIN,
    PICTURE_SIDES,
    TILE_SIDES,
    Color,
    Frame,
    beside,
    flow,
    framed,
    readable,
    stack,
    text_block,
    tile,
)
from reframe_vl.rollout.transcript import call_line, drop_line, quoted, reward_line
from reframe_vl.types import (
    RGB,
    CallRecord,
    CallStatus,
    Evidence,
    Provenance,
    Rollout,
    Sample,
    VideoMedia,
    View,
)

ASKED_COLORS: dict[CallStatus, Color] = {
    CallStatus.OK: (86, 180, 233),
    CallStatus.REPEATED: (240, 228, 66),
}
"""Of what the policy asked for and got."""
EVIDENCE_COLOR: Color = (230, 60, 20)

_MIN_WIDTH = 560
_STRIP_WIDTH = 900


def draw_rollout(
    sample: Sample,
    rollout: Rollout,
    original: RGB | None,
    decode: Callable[[Sequence[int]], str],
) -> RGB:
    """Draws a rollout.

    An image has frames around the regions asked for and around the evidence, and beside it what
    the tools returned. A video is a strip of its frames, of which those asked for and the evidence
    are framed, and below it what the tools returned. Under both stand question, answer, reward,
    what was proposed, and the policy's words.

    Args:
        sample: What it was about; its media are not looked at.
        rollout: Its views without pixels are drawn as grey tiles.
        original: The whole image, in any size; None for the view that the policy was given, and
            for videos.
        decode: From token ids to text.
    """
    given = _views(rollout, Provenance.PROMPT)
    returned = _returned(rollout)
    if not rollout.contexts:
        # The media could not be read, and so cannot be asked for their size or times.
        seen = tile(None, "nothing was seen", {})
    elif isinstance(sample.media, VideoMedia):
        strip = flow(_video_tiles(sample.media, sample.evidence, rollout, given), _STRIP_WIDTH)
        seen = stack([strip, flow(returned, _STRIP_WIDTH)])
    else:
        seen = _image_picture(sample, rollout, original, given)
        if returned:
            seen = beside(seen, flow(returned, 2 * (TILE_SIDES[1] + 2 * MARGIN)))
    caption = _caption(sample, rollout, decode, max(seen.width, _MIN_WIDTH))
    return np.array(stack([seen, caption]))


# --------------------------------------------------------------------------- what was seen


def _views(rollout: Rollout, provenance: Provenance) -> list[View]:
    """What the first context's prompt showed, or what was observed in any context."""
    contexts = rollout.contexts[:1] if provenance is Provenance.PROMPT else rollout.contexts
    return [
        view
        for context in contexts
        for span in context.spans
        if span.provenance is provenance and not span.carried
        for view in span.views
    ]


def _asked(rollout: Rollout) -> list[tuple[str, CallRecord]]:
    """The calls that returned something, numbered among all calls."""
    return [
        (f"call {number}", call)
        for number, call in enumerate(rollout.calls, 1)
        if call.status in ASKED_COLORS
    ]


def _returned(rollout: Rollout) -> list[Image.Image]:
    """A tile for each image that a tool returned, in the colour of its call."""
    owners = [
        (f"{name}: frame {item}" if call.frames else name, ASKED_COLORS[call.status])
        for name, call in _asked(rollout)
        for item in (call.frames or call.boxes)
    ]
    views = _views(rollout, Provenance.OBSERVED)
    # The last call's images are not shown where they would not have fitted into the context.
    return [
        tile(view, name, {color: False}) for view, (name, color) in zip(views, owners, strict=False)
    ]


def _image_picture(
    sample: Sample, rollout: Rollout, original: RGB | None, given: list[View]
) -> Image.Image:
    if original is None:
        original = given[0].pixels if given else None
    if original is None:
        return tile(None, "no pixels of the original", {})
    frames = [
        Frame(box, EVIDENCE_COLOR, dashed=True) for box in (sample.evidence or Evidence()).boxes
    ]
    frames += [
        Frame(box, ASKED_COLORS[call.status], name)
        for name, call in _asked(rollout)
        for box in call.boxes
    ]
    return framed(readable(original, PICTURE_SIDES), frames, sample.media.size)


def _video_tiles(
    video: VideoMedia, evidence: Evidence | None, rollout: Rollout, given: list[View]
) -> list[Image.Image]:
    """One tile a frame of the grid; grey where the policy was not given the frames."""
    times = video.timestamps_s
    shown = [replace(view, pixels=frame) for view in given for frame in view.frames]
    views: Sequence[View | None] = shown if len(shown) == len(times) else [None] * len(times)
    marked: list[tuple[frozenset[int], Color]] = []
    if evidence:
        marked.append((evidence.frames, EVIDENCE_COLOR))
    for _, call in _asked(rollout):
        marked.append((frozenset(call.frames), ASKED_COLORS[call.status]))
    return [
        tile(
            view,
            f"{frame}: {time:.1f} s",
            {color: color == EVIDENCE_COLOR for frames, color in marked if frame in frames},
        )
        for frame, (time, view) in enumerate(zip(times, views, strict=True))
    ]


def _caption(
    sample: Sample, rollout: Rollout, decode: Callable[[Sequence[int]], str], width: int
) -> Image.Image:
    options = "".join(f"  {chr(65 + i)}. {text}" for i, text in enumerate(sample.options))
    lines = [
        f"{sample.question}{options}",
        f"answered {quoted(rollout.answers)}, right is {quoted([sample.answer.value])}; "
        f"ended: {rollout.termination}",
        f"reward {reward_line(rollout)}",
        f"original {drop_line(rollout)}",
        *(f"call {number}, {call_line(call)}" for number, call in enumerate(rollout.calls, 1)),
        *([f"error: {rollout.error}"] if rollout.error else []),
        *(
            f"{span.provenance}: {decode(span.token_ids)}"
            for context in rollout.contexts
            for span in context.spans
            if span.trained
        ),
    ]
    legend = {f"asked: {status}": color for status, color in ASKED_COLORS.items()}
    return text_block(lines, {**legend, "evidence": EVIDENCE_COLOR}, width)
