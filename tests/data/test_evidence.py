import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.data.evidence import (
    applicability,
    box_coverage,
    expand_box,
    expand_segments,
    segment_coverage,
    subsample_frames,
)
from reframe_vl.types import Applicability

SIZE = (40, 30)


@st.composite
def boxes_in_image(draw: st.DrawFn) -> tuple[int, int, int, int]:
    x0, y0 = draw(st.integers(0, SIZE[0] - 1)), draw(st.integers(0, SIZE[1] - 1))
    return (x0, y0, draw(st.integers(x0 + 1, SIZE[0])), draw(st.integers(y0 + 1, SIZE[1])))


def test_expansion_is_about_the_centre_and_grows_both_sides_by_the_factor() -> None:
    assert expand_box((100, 40, 140, 50), (1000, 1000)) == (90, 37.5, 150, 52.5)


@given(boxes_in_image(), st.floats(1, 5))
def test_expanded_box_contains_the_box_and_stays_in_the_image(box, factor) -> None:
    x0, y0, x1, y1 = expand_box(box, SIZE, factor)
    assert 0 <= x0 <= box[0] < box[2] <= x1 <= SIZE[0]
    assert 0 <= y0 <= box[1] < box[3] <= y1 <= SIZE[1]


@given(boxes_in_image(), st.floats(1, 5))
def test_unclipped_expansion_scales_the_area_by_the_factor_squared(box, factor) -> None:
    far = tuple(edge + 1000 for edge in box)
    x0, y0, x1, y1 = expand_box(far, (5000, 5000), factor)
    area = (box[2] - box[0]) * (box[3] - box[1])
    assert math.isclose((x1 - x0) * (y1 - y0), factor**2 * area, rel_tol=1e-6)


def test_a_box_that_leaves_the_image_is_expanded_about_its_own_centre_then_clipped() -> None:
    assert expand_box((-10, 0, 10, 20), (100, 100)) == (0, 0, 15, 25)


@pytest.mark.parametrize("box", [(5, 5, 5, 9), (9, 5, 5, 9), (0, 0, math.nan, 4)])
def test_empty_or_reversed_boxes_are_refused(box) -> None:
    with pytest.raises(ValueError, match="x0 < x1"):
        expand_box(box, SIZE)


def test_a16_box_outside_the_image_is_refused_before_it_becomes_empty() -> None:
    with pytest.raises(ValueError, match="768x768"):
        expand_box((1101, 497, 1217, 838), (768, 768))


@given(st.lists(boxes_in_image(), max_size=8))
def test_coverage_equals_counting_pixels(boxes) -> None:
    mask = np.zeros(SIZE[::-1], bool)
    for x0, y0, x1, y1 in boxes:
        mask[y0:y1, x0:x1] = True
    assert math.isclose(box_coverage(boxes, SIZE), mask.mean(), abs_tol=1e-12)


@given(st.lists(boxes_in_image(), min_size=1, max_size=6), st.randoms())
def test_coverage_ignores_order_repetition_and_what_lies_outside(boxes, random) -> None:
    shuffled = [*boxes, boxes[0], (-50, -50, -1, -1), (60, 0, 90, 30)]
    random.shuffle(shuffled)
    assert math.isclose(box_coverage(shuffled, SIZE), box_coverage(boxes, SIZE), abs_tol=1e-12)


def test_coverage_of_nothing_is_0_and_of_everything_is_1() -> None:
    assert box_coverage([], SIZE) == 0
    assert box_coverage([(-5, -5, 100, 100)], SIZE) == 1


def test_coverage_keeps_fractions_of_pixels() -> None:
    assert box_coverage([(0.25, 0, 0.5, 30)], SIZE) == pytest.approx(0.25 / 40)


@pytest.mark.parametrize(
    ("coverage", "label"),
    [
        (0.0, Applicability.BENEFICIAL),
        (0.2499, Applicability.BENEFICIAL),
        (0.25, Applicability.NEUTRAL),
        (0.5999, Applicability.NEUTRAL),
        (0.6, Applicability.NON_BENEFICIAL),
        (1.0, Applicability.NON_BENEFICIAL),
    ],
)
def test_applicability_follows_coverage_alone(coverage, label) -> None:
    assert applicability(coverage) is label


def test_thresholds_out_of_order_and_impossible_coverages_are_refused() -> None:
    with pytest.raises(ValueError, match="must not exceed"):
        applicability(0.5, beneficial_below=0.7)
    for coverage in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="share"):
            applicability(coverage)


# --------------------------------------------------------------------------- segments

GRID = (0.5, 1.5, 2.5, 3.5, 4.5)


def slow_run(start, end, times, end_s, margin):
    inside = [i for i, time in enumerate(times) if start <= time < end]
    if not inside:
        middle = (start + min(end, end_s)) / 2
        inside = [min(range(len(times)), key=lambda i: abs(times[i] - middle))]
    widened = range(min(inside) - margin, max(inside) + margin + 1)
    return tuple(i for i in widened if 0 <= i < len(times))


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[float], float]:
    gaps = draw(st.lists(st.sampled_from([0.25, 0.5, 1, 3]), min_size=1, max_size=20))
    times = np.cumsum([draw(st.sampled_from([0, 0.5])), *gaps]).tolist()
    return times[:-1], times[-1]


@st.composite
def windows(draw: st.DrawFn, end_s: float) -> tuple[float, float]:
    start = draw(st.integers(0, math.ceil(end_s * 8) - 1)) / 8
    return (start, start + draw(st.integers(1, 80)) / 8)


@given(grids(), st.integers(0, 3), st.data())
def test_segments_equal_asking_every_frame_for_its_time(grid, margin, data) -> None:
    times, end_s = grid
    segments = data.draw(st.lists(windows(end_s), max_size=4))
    expanded = expand_segments(segments, times, end_s, margin)
    assert expanded == tuple(slow_run(*segment, times, end_s, margin) for segment in segments)


@pytest.mark.parametrize(
    ("segment", "run"),
    [
        ((1.5, 2.5), (0, 1, 2)),  # half-open: the frame at 2.5 s only by the margin
        ((1.5, 2.6), (0, 1, 2, 3)),
        ((1.6, 2.4), (0, 1, 2)),  # between two frames, both as near: the earlier
        ((1.7, 2.4), (1, 2, 3)),
        ((0, 0.1), (0, 1)),
        ((4.6, 4.9), (3, 4)),
        ((3.5, 60), (2, 3, 4)),  # ends after the video
    ],
)
def test_segments_are_half_open_widened_by_a_frame_and_clipped(segment, run) -> None:
    assert expand_segments([segment], GRID, 5.0) == (run,)


def test_overlapping_segments_stay_items_in_their_order() -> None:
    assert expand_segments([(2, 4), (1, 3)], GRID, 5.0) == ((1, 2, 3, 4), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ((2, 2), "start < end"),
        ((3, 2), "start < end"),
        ((0, math.nan), "finite"),
        ((5, 6), "ends at 5 s.*another unit.*leave the row out"),
        ((4900, 6000), "another unit"),
        ((-2, -1), "outside the video"),
    ],
)
def test_windows_that_are_empty_or_outside_are_refused_with_the_remedy(segment, words) -> None:
    with pytest.raises(ValueError, match=words):
        expand_segments([(1, 2), segment], GRID, 5.0)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1), max_size=4))
def test_segment_coverage_counts_frames_of_the_union_once(segments) -> None:
    seen = np.zeros(10, bool)
    for segment in segments:
        seen[segment] = True
    assert segment_coverage(segments, 10) == seen.mean()


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 12))
def test_subsampled_frames_are_few_enough_even_and_keep_the_ends(first, length, most) -> None:
    run = tuple(range(first, first + length))
    kept = subsample_frames(run, most)
    assert len(kept) == min(length, most) == len(set(kept))
    assert set(kept) <= set(run) and list(kept) == sorted(kept)
    if most > 1:
        assert (kept[0], kept[-1]) == (run[0], run[-1])
    if len(kept) > 2:
        assert np.ptp(np.diff(kept)) <= 1
    assert subsample_frames(kept, most) == kept
