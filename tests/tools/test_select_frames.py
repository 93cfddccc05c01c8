from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.tools.base import Reason, Refusal, Scene, ToolRequest
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.select_frames import SelectFrames, frame_range
from reframe_vl.types import RGB, Evidence, Modality, VideoMedia

TIMES = tuple(0.5 * i for i in range(16))
SCENE = Scene(
    Modality.VIDEO, (64, 48), (64, 48), CoordinateFrame.GRID_1000, timestamps_s=TIMES, max_frames=4
)


class Clip(VideoMedia):
    key = "clip"
    size = (64, 48)
    timestamps_s = TIMES

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        return [np.full((4, 4, 3), index, np.uint8) for index in frames]


def check(frames: Any, scene: Scene = SCENE) -> ToolRequest | Refusal:
    return SelectFrames().check({"frames": frames}, scene)


def refused(frames: Any, scene: Scene = SCENE) -> Reason:
    refusal = check(frames, scene)
    assert isinstance(refusal, Refusal), refusal
    assert frame_range(scene) in refusal.message
    return refusal.reason


def test_frames_come_back_ascending_without_repeats() -> None:
    request = check([7, 3, 7, 0])
    assert isinstance(request, ToolRequest)
    assert request.frames == (0, 3, 7)
    other = check([0, 3, 7])
    assert isinstance(other, ToolRequest)
    assert request.identity == other.identity


def test_a24_out_of_range_names_the_range_and_the_base() -> None:
    scene = replace(SCENE, timestamps_s=(0.0, 1.0))
    for frames in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [2], [-1]):
        assert refused(frames, scene) is Reason.OUT_OF_RANGE_FRAME
    assert "2 frames, numbered from 0 to 1" in frame_range(scene)
    request = check([0, 1], scene)
    assert isinstance(request, ToolRequest)


def test_too_many_frames_names_the_maximum() -> None:
    assert refused([0, 1, 2, 3, 4]) is Reason.TOO_MANY_FRAMES
    assert "at most 4" in frame_range(SCENE)
    assert isinstance(check([0, 1, 2, 3, 3, 3]), ToolRequest)


def test_no_frames_is_refused() -> None:
    assert refused([]) is Reason.NO_FRAMES


@pytest.mark.parametrize(
    ("frames", "coercions"), [("2", 1), (2, 1), ("[2]", 1), (["2"], 1), ([2.0], 1), ([2], 0)]
)
def test_a05_lossless_coercions_are_made_and_counted(frames: Any, coercions: int) -> None:
    request = check(frames)
    assert isinstance(request, ToolRequest)
    assert request.frames == (2,)
    assert request.coercions == coercions


@pytest.mark.parametrize(
    "frames", [True, [False], None, "two", "2-5", [1.5], {"0": 1}, [[1, 2]], "", [10**400]]
)
def test_a05_lossy_values_are_refused(frames: Any) -> None:
    assert refused(frames) is Reason.WRONG_TYPE


def test_a04_missing_and_unknown_arguments_are_told_apart() -> None:
    missing = SelectFrames().check({}, SCENE)
    unknown = SelectFrames().check({"indices": [1]}, SCENE)
    assert isinstance(missing, Refusal)
    assert isinstance(unknown, Refusal)
    assert (missing.reason, unknown.reason) == (Reason.MISSING_ARGUMENT, Reason.UNKNOWN_ARGUMENT)


@given(st.sets(st.integers(0, 15), min_size=1, max_size=4))
def test_canonical_call_returns_exactly_the_segment(frames: set[int]) -> None:
    segment = tuple(sorted(frames))
    (call,) = SelectFrames().canonical(Evidence(segments=(segment,)), SCENE)
    request = SelectFrames().check(call, SCENE)
    assert isinstance(request, ToolRequest)
    assert request.frames == segment
    assert request.coercions == 0


def test_segment_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match=r"segment .* at most 4"):
        SelectFrames().canonical(Evidence(segments=((1, 2, 3, 4, 5),)), SCENE)


def test_b16_images_come_back_as_parts_with_their_times() -> None:
    request = check([3, 6])
    assert isinstance(request, ToolRequest)
    result = SelectFrames().run(request, Clip(), 4096)
    assert [image.caption for image in result.images] == ["<1.5 seconds>", "<3.0 seconds>"]
    assert [int(image.pixels[0, 0, 0]) for image in result.images] == [3, 6]
    assert result.frames == (3, 6)
