import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.data.evidence import applicability, box_coverage, expand_box
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
