from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.tools.base import Reason, Refusal, Scene, ToolRequest
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.crop_image import CropImage, region
from reframe_vl.types import RGB, Box, Evidence, ImageMedia, Modality

SCENE = Scene(Modality.IMAGE, (1920, 1080), (960, 540), CoordinateFrame.GRID_1000)


class Picture(ImageMedia):
    key = "picture"
    size = (1920, 1080)

    def __init__(self) -> None:
        self.looked: list[tuple[Box | None, int]] = []

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        self.looked.append((box, max_pixels))
        return np.zeros((4, 6, 3), np.uint8)


def check(bbox: Any, scene: Scene = SCENE) -> ToolRequest | Refusal:
    return CropImage().check({"bbox_2d": bbox}, scene)


def accepted(bbox: Any, scene: Scene = SCENE) -> ToolRequest:
    request = check(bbox, scene)
    assert isinstance(request, ToolRequest), request
    return request


def refused(bbox: Any, scene: Scene = SCENE) -> Reason:
    refusal = check(bbox, scene)
    assert isinstance(refusal, Refusal), refusal
    assert "0 <= x0 < x1 <= 1000" in refusal.message
    return refusal.reason


@pytest.mark.parametrize(
    ("frame", "bbox"),
    [
        (CoordinateFrame.GRID_1000, [100, 500, 500, 750]),
        (CoordinateFrame.UNIT, [0.1, 0.5, 0.5, 0.75]),
        (CoordinateFrame.PIXEL_FED, [96, 270, 480, 405]),
    ],
)
def test_a12_a13_each_frame_gives_the_expected_region(
    frame: CoordinateFrame, bbox: list[float]
) -> None:
    request = accepted(bbox, replace(SCENE, frame=frame))
    (box,) = request.boxes
    assert box == pytest.approx((192, 540, 960, 810))
    assert request.coercions == 0


def test_a12_warns_once_where_pixels_look_like_the_grid(caplog: pytest.LogCaptureFixture) -> None:
    size = (4000, 3000)
    scene = Scene(Modality.IMAGE, size, size, CoordinateFrame.PIXEL_FED)
    tool = CropImage()
    with caplog.at_level(logging.WARNING):
        tool.check({"bbox_2d": [100, 100, 1900, 900]}, scene)
        assert not caplog.records
        tool.check({"bbox_2d": [100, 100, 900, 900]}, replace(scene, fed_size=(800, 600)))
        tool.check({"bbox_2d": [100, 100, 900, 900]}, replace(scene, frame=SCENE.frame))
        assert not caplog.records
        for _ in range(3):
            tool.check({"bbox_2d": [100, 100, 900, 900]}, scene)
    assert len(caplog.records) == 1
    assert "grid_1000" in caplog.text


def test_a14_reversed_box_is_refused_or_reordered() -> None:
    bbox = [300, 200, 100, 50]
    assert refused(bbox) is Reason.REVERSED_BOX
    assert refused([300, 50, 100, 200]) is Reason.REVERSED_BOX
    request = accepted(bbox, replace(SCENE, reorder_reversed=True))
    assert request.boxes == accepted([100, 50, 300, 200]).boxes
    assert request.coercions == 1


def test_a16_box_of_another_image_scale_is_outside() -> None:
    scene = Scene(Modality.IMAGE, (768, 768), (768, 768), CoordinateFrame.PIXEL_FED)
    refusal = check([801, 497, 1017, 838], scene)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.OUTSIDE_IMAGE


@pytest.mark.parametrize("bbox", [[-300, 0, -1, 10], [0, 1000, 10, 1200], [1000, 0, 1001, 9]])
def test_a16_boxes_that_only_touch_the_image_are_outside(bbox: list[int]) -> None:
    assert refused(bbox) is Reason.OUTSIDE_IMAGE


def test_box_that_partly_leaves_the_image_is_clipped() -> None:
    assert accepted([-50, 900, 500, 1200]).boxes == ((0, 972, 960, 1080),)


def test_identity_ignores_how_a_request_was_written() -> None:
    plain, other = accepted([0, 500, 500, 1000]), accepted(["0", 500.0, 500, 2000])
    assert plain.identity == other.identity
    assert hash(plain.identity) == hash(other.identity)
    assert plain.identity != accepted([0, 500, 500, 999]).identity
    assert other.coercions == 2


@pytest.mark.parametrize("bbox", [[5, 5, 5, 9], [5, 5, 9, 5], [0, 0, 0, 0]])
def test_box_without_area_is_refused(bbox: list[int]) -> None:
    assert refused(bbox) is Reason.EMPTY_BOX
    assert refused(bbox, replace(SCENE, reorder_reversed=True)) is Reason.EMPTY_BOX


def test_small_box_is_refused_after_clipping() -> None:
    scene = replace(SCENE, min_side=20.0)
    assert refused([990, 0, 1500, 900], scene) is Reason.TOO_SMALL
    assert accepted([989, 0, 1500, 900], scene)


@pytest.mark.parametrize(
    ("bbox", "coercions"),
    [
        (["100", 200, "300", 400], 2),
        ([100.0, 200, 300, 400], 1),
        (["100.0", " 200 ", 300, 400], 2),
        ("[100, 200, 300, 400]", 1),
    ],
)
def test_a05_lossless_coercions_are_made_and_counted(bbox: Any, coercions: int) -> None:
    request = accepted(bbox)
    assert request.boxes == accepted([100, 200, 300, 400]).boxes
    assert request.coercions == coercions


@pytest.mark.parametrize(
    "bbox",
    [
        True,
        None,
        7,
        "somewhere",
        "true",
        "",
        {"x0": 1},
        [True, 200, 300, 400],
        [100, None, 300, 400],
        [100.5, 200, 300, 400],
        ["1e2", 200, 300, 400],
        ["0x10", 200, 300, 400],
        ["٣", 200, 300, 400],
        [[100], 200, 300, 400],
        [float("nan"), 200, 300, 400],
        [float("inf"), 200, 300, 400],
        [10**400, 200, 300, 400],
        ["9" * 400, 200, 300, 400],
    ],
)
def test_a05_lossy_values_are_refused(bbox: Any) -> None:
    assert refused(bbox) is Reason.WRONG_TYPE


@pytest.mark.parametrize("bbox", [[], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_wrong_number_of_coordinates_is_refused(bbox: list[int]) -> None:
    assert refused(bbox) is Reason.WRONG_LENGTH


def test_a04_missing_and_unknown_arguments_are_told_apart() -> None:
    missing = CropImage().check({}, SCENE)
    assert isinstance(missing, Refusal)
    assert missing.reason is Reason.MISSING_ARGUMENT
    assert "bbox_2d" in missing.message
    unknown = CropImage().check({"bbox_2d": [0, 0, 9, 9], "label": 3}, SCENE)
    assert isinstance(unknown, Refusal)
    assert unknown.reason is Reason.UNKNOWN_ARGUMENT
    assert "label" in unknown.message


coordinates = st.floats(-5000, 5000)


@given(
    st.tuples(coordinates, coordinates, coordinates, coordinates),
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    st.booleans(),
)
def test_a14_region_is_inside_and_large_enough_or_refused(
    box: Box, size: tuple[int, int], reorder: bool
) -> None:
    found = region(box, size, min_side=2.0, reorder_reversed=reorder)
    if isinstance(found, Refusal):
        return
    x0, y0, x1, y1 = found
    assert 0 <= x0 <= x1 - 2 < x1 <= size[0]
    assert 0 <= y0 <= y1 - 2 < y1 <= size[1]


@given(
    st.sampled_from(CoordinateFrame),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
    st.floats(0.1, 1),
    st.floats(0.1, 1),
)
def test_canonical_call_executes_and_matches_its_evidence(
    frame: CoordinateFrame, left: float, top: float, wide: float, high: float
) -> None:
    scene = replace(SCENE, frame=frame)
    box = (
        left * 1920,
        top * 1080,
        min(left + wide, 1.0) * 1920,
        min(top + high, 1.0) * 1080,
    )
    if min(box[2] - box[0], box[3] - box[1]) < 100:
        return
    (call,) = CropImage().canonical(Evidence(boxes=(box,)), scene)
    got = accepted(call["bbox_2d"], scene).boxes[0]
    width = min(box[2], got[2]) - max(box[0], got[0])
    height = min(box[3], got[3]) - max(box[1], got[1])
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (box, got)]
    assert width * height / (sum(areas) - width * height) >= 0.95


def test_canonical_keeps_annotation_order() -> None:
    boxes = ((960.0, 0.0, 1920.0, 540.0), (0.0, 540.0, 960.0, 1080.0))
    assert CropImage().canonical(Evidence(boxes=boxes), SCENE) == [
        {"bbox_2d": [500, 0, 1000, 500]},
        {"bbox_2d": [0, 500, 500, 1000]},
    ]


def test_a16_evidence_that_cannot_be_asked_for_is_named() -> None:
    scene = replace(SCENE, min_side=50.0)
    with pytest.raises(ValueError, match="evidence box"):
        CropImage().canonical(Evidence(boxes=((0.0, 0.0, 30.0, 500.0),)), scene)


def test_run_looks_at_the_requested_region() -> None:
    picture = Picture()
    request = accepted([100, 500, 500, 750])
    result = CropImage().run(request, picture, 4096)
    assert picture.looked == [((192, 540, 960, 810), 4096)]
    assert result.boxes == request.boxes
    assert [image.caption for image in result.images] == [""]
