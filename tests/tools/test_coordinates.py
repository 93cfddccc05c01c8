from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.tools.coordinates import UNIT_STEPS, CoordinateFrame, from_pixels, to_pixels
from reframe_vl.types import Box

SIZE, FED = (1920, 1080), (960, 540)
BOX = (192.0, 540.0, 960.0, 810.0)
WRITTEN: dict[CoordinateFrame, list[int | float]] = {
    CoordinateFrame.GRID_1000: [100, 500, 500, 750],
    CoordinateFrame.UNIT: [0.1, 0.5, 0.5, 0.75],
    CoordinateFrame.PIXEL_FED: [96, 270, 480, 405],
}


def iou(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    inter = max(width, 0.0) * max(height, 0.0)
    area = [(c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)]
    return inter / (sum(area) - inter)


@pytest.mark.parametrize("frame", CoordinateFrame)
def test_a13_asymmetric_box_is_x_first_in_every_frame(frame: CoordinateFrame) -> None:
    assert to_pixels(WRITTEN[frame], frame, SIZE, FED) == pytest.approx(BOX)
    assert from_pixels(BOX, frame, SIZE, FED) == pytest.approx(WRITTEN[frame])


def test_a11_pixels_are_those_of_the_image_as_fed() -> None:
    frame = CoordinateFrame.PIXEL_FED
    written = WRITTEN[frame]
    assert list(to_pixels(written, frame, SIZE, SIZE)) == written
    assert to_pixels(written, frame, SIZE, FED) == BOX


def test_a12_the_same_numbers_mean_what_the_frame_says() -> None:
    numbers, size = [100, 100, 900, 900], (4000, 3000)
    grid = to_pixels(numbers, CoordinateFrame.GRID_1000, size, size)
    pixels = to_pixels(numbers, CoordinateFrame.PIXEL_FED, size, size)
    assert (list(grid), list(pixels)) == ([400, 300, 3600, 2700], [100, 100, 900, 900])


def test_corners_of_the_image_map_exactly_in_every_frame() -> None:
    for frame in CoordinateFrame:
        whole = from_pixels((0.0, 0.0, 1920.0, 1080.0), frame, SIZE, FED)
        assert whole == [0, 0, *frame.extent(FED)]
        assert to_pixels(whole, frame, SIZE, FED) == (0, 0, 1920, 1080)


def test_numbers_are_of_the_frame_type() -> None:
    for frame in CoordinateFrame:
        due = int if frame.integral else float
        assert all(type(v) is due for v in from_pixels(BOX, frame, SIZE, FED))


@st.composite
def boxes_of_forty_steps(draw: st.DrawFn) -> tuple[Box, CoordinateFrame, tuple[int, int]]:
    frame = draw(st.sampled_from(CoordinateFrame))
    size = draw(st.tuples(st.integers(200, 5000), st.integers(200, 5000)))
    fed = (max(size[0] // 3, 64), max(size[1] // 2, 64))
    steps = fed if frame is CoordinateFrame.PIXEL_FED else (1000, 1000)
    steps = (UNIT_STEPS, UNIT_STEPS) if frame is CoordinateFrame.UNIT else steps
    edges = []
    for length, count in zip(size, steps, strict=True):
        shortest = 40 / count
        low = draw(st.floats(0, 1 - shortest))
        high = draw(st.floats(low + shortest, max(low + shortest, 1.0)))
        edges.append((low * length, min(high, 1.0) * length))
    (x0, x1), (y0, y1) = edges
    return (x0, y0, x1, y1), frame, size


@given(boxes_of_forty_steps())
def test_round_trip_keeps_iou_of_095(case: tuple[Box, CoordinateFrame, tuple[int, int]]) -> None:
    box, frame, size = case
    fed = (max(size[0] // 3, 64), max(size[1] // 2, 64))
    again = to_pixels(from_pixels(box, frame, size, fed), frame, size, fed)
    assert iou(box, again) >= 0.95 - 1e-9


@given(
    st.sampled_from(CoordinateFrame),
    st.tuples(st.floats(0, 640), st.floats(0, 480), st.floats(0, 640), st.floats(0, 480)),
)
def test_written_boxes_are_inside_and_never_empty(frame: CoordinateFrame, box: Box) -> None:
    x0, x1 = sorted((box[0], box[2]))
    y0, y1 = sorted((box[1], box[3]))
    a, b, c, d = from_pixels((x0, y0, x1, y1), frame, (640, 480), (320, 240))
    right, bottom = frame.extent((320, 240))
    assert 0 <= a < c <= right
    assert 0 <= b < d <= bottom
