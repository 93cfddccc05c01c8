import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.data.media import pixel_region
from reframe_vl.evaluation.controls import control_box, control_frames


def overlap(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)


@st.composite
def scenes(draw):
    width, height = draw(st.integers(20, 900)), draw(st.integers(20, 900))

    def span(length):
        # A move costs the last bit: where that alone decides about a pixel, sizes may differ by it.
        low = round(draw(st.floats(0, length - 4)), 4)
        return low, round(draw(st.floats(low + 3, length)), 4)

    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        (x0, x1), (y0, y1) = span(width), span(height)
        boxes.append((x0, y0, x1, y1))
    return (width, height), boxes


@given(scenes(), st.integers(0, 99))
def test_a_control_is_inside_disjoint_from_all_evidence_and_crops_to_the_same_size(scene, seed):
    size, boxes = scene
    for box in boxes:
        control = control_box(box, size, boxes, np.random.default_rng(seed))
        if control is None:
            continue
        assert control[0] >= 0 and control[1] >= 0
        assert control[2] <= size[0] and control[3] <= size[1]
        # A move by whole pixels keeps the sum of floats exact to a rounding.
        assert all(overlap(control, other) < 1e-9 for other in boxes)
        one, two = pixel_region(box, size), pixel_region(control, size)
        assert (one[2] - one[0], one[3] - one[1]) == (two[2] - two[0], two[3] - two[1])


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40), st.integers(1, 40))
def test_one_box_has_a_control_exactly_where_the_image_leaves_room(x, y, width, height):
    size = (100, 100)
    box = (float(x), float(y), float(x + width), float(y + height))
    room = max(x, 100 - x - width) >= width or max(y, 100 - y - height) >= height
    found = control_box(box, size, [box], np.random.default_rng(0))
    assert (found is not None) == room


def test_a_box_that_covers_most_of_the_image_has_no_control():
    box = (0.0, 0.0, 80.0, 80.0)
    assert control_box(box, (100, 100), [box], np.random.default_rng(0)) is None


def test_controls_reach_every_side_of_the_evidence():
    box = (45.0, 45.0, 55.0, 55.0)
    found = [control_box(box, (100, 100), [box], np.random.default_rng(i)) for i in range(200)]
    assert len(set(found)) > 150
    assert {(c[0] < 45, c[1] < 45) for c in found} == {(a, b) for a in (0, 1) for b in (0, 1)}


@given(st.integers(1, 20), st.data())
def test_control_frames_are_as_many_and_disjoint_and_exist_where_they_fit(num_frames, data):
    first = data.draw(st.integers(0, num_frames - 1))
    frames = tuple(range(first, data.draw(st.integers(first, num_frames - 1)) + 1))
    others = data.draw(st.frozensets(st.integers(0, num_frames - 1), max_size=5))
    evidence = frozenset(frames) | others
    control = control_frames(frames, num_frames, evidence, np.random.default_rng(0))
    runs = [range(s, s + len(frames)) for s in range(num_frames - len(frames) + 1)]
    assert (control is not None) == any(not evidence & set(run) for run in runs)
    if control is not None:
        assert len(control) == len(frames) and not evidence & set(control)
        assert set(control) <= set(range(num_frames))


@pytest.mark.parametrize("seed", range(3))
def test_a_control_depends_on_its_seed_alone(seed):
    a, b = (
        control_box((10.5, 3.2, 30.0, 20.0), (200, 90), [], np.random.default_rng(seed))
        for _ in range(2)
    )
    assert a == b
