from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reframe_vl.rollout.canvas import MARGIN, PICTURE_SIDES
from reframe_vl.rollout.picture import ASKED_COLORS, EVIDENCE_COLOR, draw_rollout
from reframe_vl.types import (
    RGB,
    Answer,
    Box,
    CallRecord,
    CallStatus,
    Context,
    Evidence,
    ImageMedia,
    Modality,
    Provenance,
    Rollout,
    RolloutKey,
    Sample,
    Sampling,
    Span,
    Termination,
    VideoMedia,
    View,
)

OK, REPEATED = ASKED_COLORS[CallStatus.OK], ASKED_COLORS[CallStatus.REPEATED]
WIDTH, HEIGHT = 64, 24
SCALE = PICTURE_SIDES[0] // WIDTH


@dataclass(frozen=True)
class Wide(ImageMedia):
    @property
    def key(self) -> str:
        return "wide"

    @property
    def size(self) -> tuple[int, int]:
        return (WIDTH, HEIGHT)

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        raise AssertionError("the media are not looked at")


@dataclass(frozen=True)
class Clip(VideoMedia):
    @property
    def key(self) -> str:
        return "clip"

    @property
    def size(self) -> tuple[int, int]:
        return (8, 8)

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        return (0.0, 0.5, 1.0)

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        raise AssertionError("the media are not looked at")


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def words(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def grey(level: int, height: int = HEIGHT, width: int = WIDTH) -> RGB:
    return np.full((height, width, 3), level, np.uint8)


def shade(level: int) -> tuple[int, int, int]:
    """No grey: smooth letters have them all."""
    return (level, 20, 140)


def view(level: int) -> View:
    return View.of(np.full((8, 8, 3), shade(level), np.uint8), (1, 2, 2), 1)


def image_sample(*evidence: Box) -> Sample:
    return Sample(
        "s", Modality.IMAGE, Wide(), "What?", Answer("open", "x"), evidence=Evidence(evidence)
    )


def rollout(*calls: CallRecord, prompt: Sequence[View] = (), seen: Sequence[View] = ()) -> Rollout:
    spans = [
        Span(Provenance.PROMPT, words("prompt"), views=tuple(prompt)),
        Span(Provenance.SAMPLED, words("look")),
        Span(Provenance.OBSERVED, words("seen"), views=tuple(seen)),
        Span(Provenance.SAMPLED, words("answer")),
    ]
    return Rollout(
        RolloutKey(0, 0, "s", 0), [Context(spans)], Sampling(), Termination.ANSWERED, calls=[*calls]
    )


def crop(box: Box, status: CallStatus = CallStatus.OK) -> CallRecord:
    return CallRecord(0, "CropImage", {}, status, boxes=(box,))


def where(picture: RGB, color: tuple[int, int, int]) -> np.ndarray:
    """Where the drawn original has a colour, in its own enlarged pixels."""
    part = picture[: MARGIN + HEIGHT * SCALE + MARGIN, : MARGIN + WIDTH * SCALE + MARGIN]
    return np.argwhere((part == color).all(-1))[:, ::-1] - MARGIN


corner = st.tuples(st.integers(0, WIDTH - 8), st.integers(0, HEIGHT - 8))


@settings(max_examples=25)
@given(corner, st.data())
def test_what_was_asked_for_is_framed_inside_its_edge_on_a_wide_image(start, data):
    x0, y0 = start
    x1 = data.draw(st.integers(x0 + 4, WIDTH))
    y1 = data.draw(st.integers(y0 + 4, HEIGHT))
    # Unlabelled, the colour is the frame's alone: a refused call has neither.
    call = crop((float(x0), float(y0), float(x1), float(y1)))
    picture = draw_rollout(image_sample(), rollout(call), grey(90), decode)
    left, top = MARGIN + x0 * SCALE, MARGIN + y0 * SCALE
    right, bottom = MARGIN + x1 * SCALE - 1, MARGIN + y1 * SCALE - 1
    middle_x, middle_y = (left + right) // 2, (top + bottom) // 2
    for x, y in ((left, middle_y), (right, middle_y), (right, top + 2), (middle_x, top)):
        assert tuple(picture[y, x]) == OK
    assert tuple(picture[middle_y, left - 1]) != OK or x0 == 0
    assert tuple(picture[middle_y, right + 1]) != OK
    assert tuple(picture[middle_y, middle_x]) == (90, 90, 90)


def test_evidence_is_dashed_outside_its_edge_even_where_it_was_asked_for_exactly():
    box = (8.0, 12.0, 40.0, 24.0)
    picture = draw_rollout(image_sample(box), rollout(crop(box)), grey(90), decode)
    evidence = where(picture, EVIDENCE_COLOR)
    x0, y0, x1, y1 = (int(v) * SCALE for v in box)
    inside = (evidence >= (x0, y0)).all(1) & (evidence < (x1, y1)).all(1)
    assert len(evidence) and not inside.any()
    assert evidence.min(0).tolist() == [x0 - 4, y0 - 4]
    # The lower edge is the image's own: the frame lies in the margin.
    assert evidence[:, 1].max() == y1 + 3
    assert [x0, (y0 + y1) // 2] in where(picture, OK).tolist()


def test_a_repeated_call_is_framed_within_the_one_it_repeats():
    box = (16.0, 0.0, 48.0, 24.0)
    calls = [crop(box), crop(box, CallStatus.REPEATED)]
    picture = draw_rollout(image_sample(), rollout(*calls), grey(90), decode)
    row = picture[MARGIN + HEIGHT * SCALE // 2, MARGIN + 16 * SCALE :]
    assert [tuple(pixel) for pixel in row[:5]] == [OK, OK, REPEATED, REPEATED, (90, 90, 90)]


@pytest.mark.parametrize("box", [(0.0, 0.0, 64.0, 24.0), (60.0, 0.0, 64.0, 4.0)])
def test_the_label_of_a_call_stays_within_the_picture(box):
    picture = draw_rollout(image_sample(), rollout(crop(box)), grey(90), decode)
    # The frame alone has fewer pixels than this.
    label = where(picture, OK)
    frame = 2 * 2 * SCALE * int(box[2] - box[0] + box[3] - box[1])
    assert len(label) > frame + 300


def test_a_refused_call_is_told_but_not_framed():
    refused = CallRecord(0, "CropImage", {}, CallStatus.REFUSED, reason="reversed_box")
    picture = draw_rollout(image_sample(), rollout(refused), grey(90), decode)
    assert len(where(picture, OK)) == len(where(picture, REPEATED)) == 0
    without = draw_rollout(image_sample(), rollout(), grey(90), decode)
    assert picture.shape[0] > without.shape[0]


def test_a_reduced_or_enlarged_original_is_framed_in_the_same_places():
    call = rollout(crop((16.0, 4.0, 48.0, 20.0)))
    large = grey(90, 10 * HEIGHT, 10 * WIDTH)
    small = draw_rollout(image_sample(), call, grey(90), decode)
    other = draw_rollout(image_sample(), call, large, decode)
    assert tuple(small[MARGIN + 12 * SCALE, MARGIN + 16 * SCALE]) == OK
    assert tuple(other[MARGIN + 120, MARGIN + 160]) == OK
    huge = draw_rollout(image_sample(), rollout(), grey(90, 3000, 8000), decode)
    assert huge.shape[1] == PICTURE_SIDES[1] + 2 * MARGIN


def test_what_the_tools_returned_stands_beside_the_original_once():
    call = crop((0.0, 0.0, 8.0, 8.0))
    shown = rollout(call, prompt=[view(10)], seen=[view(200)])
    first = shown.contexts[0].spans
    carried = [replace(span, carried=True) for span in first[1:]]
    shown.contexts.append(Context([Span(Provenance.PROMPT, words("text")), *carried]))
    picture = draw_rollout(image_sample(), shown, grey(90), decode)
    found = np.argwhere((picture == shade(200)).all(-1))
    assert found[:, 1].min() > MARGIN + WIDTH * SCALE + MARGIN
    # An 8x8 view is enlarged 12 times; its frame hides two pixels on every side.
    assert len(found) == (8 * 12 - 4) ** 2


def test_frames_of_a_video_are_framed_where_selected_and_where_they_are_evidence():
    sample = Sample(
        "v",
        Modality.VIDEO,
        Clip(),
        "When?",
        Answer("number", "1"),
        evidence=Evidence(segments=((1, 2),)),
    )
    call = CallRecord(0, "SelectFrames", {"frames": [2]}, CallStatus.OK, frames=(2,))
    levels = (50, 100, 150)
    shown = rollout(call, prompt=[view(v) for v in levels], seen=[view(150)])
    picture = draw_rollout(sample, shown, None, decode)
    found = {}
    for level in levels:
        y, x = np.argwhere((picture == shade(level)).all(-1))[0]
        found[level] = [tuple(int(v) for v in picture[y + 30, x - back]) for back in (1, 3)]
    assert found[50] == [(250, 250, 250)] * 2
    assert EVIDENCE_COLOR in found[100] and OK not in found[100]
    assert found[150][0] == OK and found[150][1] == EVIDENCE_COLOR


def test_a_native_videos_frames_are_drawn_one_by_one():
    sample = Sample("v", Modality.VIDEO, Clip(), "When?", Answer("number", "1"))
    frames = [view(level) for level in (50, 100, 150)]
    pixels = np.concatenate([frame.pixels for frame in frames[:2]])
    native = [
        View.of(pixels, (1, 2, 2), 1, Modality.VIDEO),
        replace(frames[2], modality=Modality.VIDEO),
    ]
    drawn = [
        draw_rollout(sample, rollout(prompt=shown), None, decode) for shown in (frames, native)
    ]
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize("original", [None, grey(90)])
def test_rollouts_without_pixels_or_contexts_are_drawn_all_the_same(original):
    blind = replace(view(1), pixels=None)
    drawn = [draw_rollout(image_sample(), rollout(prompt=[blind], seen=[blind]), original, decode)]
    failed = rollout()
    failed.contexts, failed.error = [], "a\x1b[31m file 日本 is missing" * 40
    drawn.append(draw_rollout(image_sample((0.0, 0.0, 4.0, 4.0)), failed, original, decode))
    video = Sample("v", Modality.VIDEO, Clip(), "When?", Answer("number", "1"))
    drawn.append(draw_rollout(video, failed, None, decode))
    assert all(picture.ndim == 3 and np.ptp(picture) > 0 for picture in drawn)
