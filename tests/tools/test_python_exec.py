from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from reframe_vl.tools.base import ProposedCall, Reason, Refusal, Scene, ToolResult, propose
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.python_exec import PythonRequest, PythonTool
from reframe_vl.types import RGB, Box, Evidence, ImageMedia, Modality

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed (apt-get install bubblewrap)"
)
SCENE = Scene(Modality.IMAGE, (8, 6), (8, 6), CoordinateFrame.GRID_1000)


class Ramp(ImageMedia):
    key = "ramp"
    size = (8, 6)

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        return np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3)


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    tool = PythonTool("image", warm=1)
    yield tool
    tool.close()


def request(tool: PythonTool, code: Any) -> PythonRequest:
    checked = tool.check({"code": code}, SCENE)
    assert isinstance(checked, PythonRequest), checked
    return checked


def run(tool: PythonTool, code: str) -> ToolResult:
    return tool.run(request(tool, code), Ramp(), 10_000)


def test_calls_of_a_session_share_variables_and_sessions_share_none(tool: PythonTool) -> None:
    with tool.session(Ramp()) as first, tool.session(Ramp()) as second:
        run(first, "x = 5")
        assert run(first, "x").text == "5"
        assert "NameError" in run(second, "x").text


def test_a_call_outside_of_a_session_has_an_interpreter_of_its_own(tool: PythonTool) -> None:
    assert run(tool, "x = 5").text == "(The code printed nothing.)"
    result = run(tool, "x")
    assert result.failed and "NameError" in result.text


def test_images_and_text_come_back_apart(tool: PythonTool) -> None:
    result = run(tool, "print('all of it')\nimage_0")
    assert result.text == "all of it" and not result.failed
    assert (result.images[0].pixels == Ramp().look(None, 1)).all()
    assert run(tool, "image_0").text == ""


def test_the_same_code_is_another_request_each_time(tool: PythonTool) -> None:
    first, second = request(tool, "x += 1"), request(tool, "x += 1")
    assert first.identity == first.identity
    assert first.identity != second.identity
    assert first == second


def test_a_markdown_fence_is_taken_off(tool: PythonTool) -> None:
    fenced = request(tool, "```python\nif 1:\n    print(2)\n```\n")
    assert (fenced.code, fenced.coercions) == ("if 1:\n    print(2)", 1)
    assert request(tool, "print('```')").coercions == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, Reason.MISSING_ARGUMENT),
        ({"code": "1", "timeout": 5}, Reason.UNKNOWN_ARGUMENT),
        ({"code": 5}, Reason.WRONG_TYPE),
        ({"code": None}, Reason.WRONG_TYPE),
        ({"code": " \n"}, Reason.EMPTY_CALL),
        ({"code": "```\n```"}, Reason.EMPTY_CALL),
        ({"code": "#" * 20_001}, Reason.WRONG_LENGTH),
    ],
)
def test_other_arguments_are_refused(
    tool: PythonTool, arguments: dict[str, Any], reason: Reason
) -> None:
    refusal = tool.check(arguments, SCENE)
    assert isinstance(refusal, Refusal) and refusal.reason is reason


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_code_survives_each_familys_call_syntax(tool: PythonTool, family: str) -> None:
    code = 'for i in range(3):\n    if i < 2 and "a":\n        print(f"{i}\\n")\n\nx = {"a": [1]}'
    codec = codec_for(family)
    parsed = codec.parse(codec.render_call("python", {"code": code}), truncated=False)
    assert isinstance(parsed.call, ProposedCall)
    proposed = propose(parsed.call, [tool], SCENE)
    assert not isinstance(proposed, Refusal)
    assert isinstance(proposed[1], PythonRequest) and proposed[1].code == code
    assert "image_0" in codec.tools_text([tool])


def test_evidence_has_code_that_shows_it(tool: PythonTool) -> None:
    evidence = Evidence(boxes=((2.0, 1.0, 6.0, 4.0),))
    (call,) = tool.canonical(evidence, SCENE)
    (image,) = run(tool, call["code"]).images
    assert (image.pixels == Ramp().look(None, 1)[1:4, 2:6]).all()
    (call,) = PythonTool("video", warm=0).canonical(Evidence(segments=((1, 2),)), SCENE)
    assert call == {"code": "show(video.frames([1, 2]))"}
