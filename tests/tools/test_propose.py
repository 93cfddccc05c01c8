from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.tools.base import ProposedCall, Reason, Refusal, Scene, propose
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.registry import default_tools
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import Modality

IMAGE = Scene(Modality.IMAGE, (640, 480), (320, 240), CoordinateFrame.GRID_1000)
VIDEO = Scene(
    Modality.VIDEO, (64, 48), (64, 48), CoordinateFrame.GRID_1000, timestamps_s=(0.0, 1.0)
)
TOOLS = default_tools()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def refused(call: ProposedCall, scene: Scene = IMAGE) -> Refusal:
    refusal = propose(call, TOOLS, scene)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_valid_call_finds_its_tool() -> None:
    found = propose(ProposedCall("CropImage", {"bbox_2d": [0, 0, 500, 500]}), TOOLS, IMAGE)
    assert not isinstance(found, Refusal)
    tool, request = found
    assert tool.name == request.name == "CropImage"
    assert request.boxes == ((0, 0, 320, 240),)


def test_a21_unknown_tool_names_those_that_can_be_called() -> None:
    for name in ("crop", "cropimage", "CropImage2", "x" * 500, "\ud800"):
        refusal = refused(ProposedCall(name, {}))
        assert refusal.reason is Reason.UNKNOWN_TOOL
        assert "CropImage" in refusal.message
        assert "SelectFrames" not in refusal.message
        assert len(refusal.message.encode()) < 150


def test_tool_of_the_other_modality_is_refused() -> None:
    assert refused(ProposedCall("SelectFrames", {"frames": [0]})).reason is Reason.WRONG_MODALITY
    crop = ProposedCall("CropImage", {"bbox_2d": [0, 0, 9, 9]})
    assert refused(crop, VIDEO).reason is Reason.WRONG_MODALITY


@pytest.mark.parametrize("arguments", [[1, 2, 3, 4], 7, None, True, "text"])
def test_a03_arguments_that_are_no_mapping_never_reach_the_tool(arguments: Any) -> None:
    refusal = refused(ProposedCall("CropImage", arguments))
    assert refusal.reason is Reason.ARGUMENTS_NOT_MAPPING


def test_tools_of_one_name_are_told_apart_by_their_modality() -> None:
    class FramesAsCrop(SelectFrames):
        name = "CropImage"

    call = ProposedCall("CropImage", {"bbox_2d": [0, 0, 500, 500]})
    outcome = propose(call, [FramesAsCrop(), CropImage()], IMAGE)
    assert not isinstance(outcome, Refusal) and isinstance(outcome[0], CropImage)


def test_default_tools_are_of_their_modality() -> None:
    assert [tool.name for tool in default_tools(Modality.IMAGE)] == ["CropImage"]
    assert [tool.name for tool in default_tools(Modality.VIDEO)] == ["SelectFrames"]


@given(st.sampled_from(["CropImage", "SelectFrames"]), json_values, json_values)
def test_a05_any_argument_gives_a_request_or_a_refusal(name: str, value: Any, bare: Any) -> None:
    key = "bbox_2d" if name == "CropImage" else "frames"
    scene = IMAGE if name == "CropImage" else VIDEO
    for arguments in ({key: value}, {key: [value] * 4}, bare):
        outcome = propose(ProposedCall(name, arguments), TOOLS, scene)
        assert isinstance(outcome, Refusal | tuple)
        if isinstance(outcome, Refusal):
            assert outcome.message.encode()
