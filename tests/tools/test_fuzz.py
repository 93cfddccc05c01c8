from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz_text import CODECS, turns
from reframe_vl.mini.world import MiniWorld
from reframe_vl.tools.base import ProposedCall, Reason, Refusal, Scene, ToolRequest, propose
from reframe_vl.tools.codec import Codec, codec_for
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.crop_image import CropImage, region
from reframe_vl.tools.registry import default_tools
from reframe_vl.tools.turns import ParsedTurn
from reframe_vl.types import Modality

TOOLS = default_tools()
IMAGE = MiniWorld().sample("fuzz", 0).media


def scene(codec: Codec, modality: Modality, reorder: bool) -> Scene:
    times = tuple(map(float, range(6))) if modality is Modality.VIDEO else ()
    return Scene(
        modality, (128, 128), (32, 32), codec.frame, times, max_frames=4, reorder_reversed=reorder
    )


def is_reasoned(refusal: Refusal) -> bool:
    """Whether a refusal can be shown: it says something, in few words that a file accepts."""
    return refusal.reason in Reason and 0 < len(refusal.message.encode()) < 1_000


def is_runnable(request: ToolRequest, of: Scene) -> bool:
    for x0, y0, x1, y1 in request.boxes:
        assert all(map(math.isfinite, (x0, y0, x1, y1)))
        assert 0 <= x0 < x1 <= 128 and 0 <= y0 < y1 <= 128
        assert min(x1 - x0, y1 - y0) >= of.min_side
    assert request.frames == tuple(sorted(set(request.frames)))
    assert set(request.frames) <= set(range(of.num_frames))
    return len(request.boxes) == 1 or 0 < len(request.frames) <= of.max_frames


def outcome(codec: Codec, text: str, truncated: bool, of: Scene) -> str:
    """What becomes of a turn: exactly one thing, whatever the text is."""
    turn = codec.parse(text, truncated)
    assert turn.call is None or turn.refusal is None
    assert turn.call_start is None or text[turn.call_start :].startswith("<tool_call>")
    assert (turn.call_start is None) == (turn.call is None and turn.refusal is None)
    if turn.call is None and turn.refusal is None:
        return "answer" if turn.answers else "end"
    found = turn.refusal or propose(turn.call, TOOLS, of)
    if isinstance(found, Refusal):
        assert is_reasoned(found)
        return found.reason
    assert not turn.answers
    _, request = found
    assert is_runnable(request, of)
    # As a record is written and read back.
    assert json.loads(json.dumps(turn.call.arguments)) == turn.call.arguments
    return "run"


def test_a01_a02_a03_any_turn_is_a_call_a_refusal_with_its_reason_an_answer_or_an_end() -> None:
    seen: set[str] = set()

    @settings(max_examples=500)
    @given(st.data(), st.sampled_from(CODECS), st.sampled_from(Modality), *[st.booleans()] * 2)
    def read(
        data: st.DataObject, codec: Codec, modality: Modality, truncated: bool, reorder: bool
    ) -> None:
        text = data.draw(turns(codec))
        of = scene(codec, modality, reorder)
        first = outcome(codec, text, truncated, of)
        # What follows the end of the turn changes nothing.
        assert outcome(codec, f"{text}<|im_end|>{text}", truncated, of) == first
        seen.add(first)

    read()
    # The texts lie on both sides of the border.
    assert seen >= {"run", "answer", "end", Reason.NOT_JSON, Reason.NOT_XML, Reason.WRONG_TYPE}


@given(st.lists(st.floats(allow_nan=False) | st.integers(), min_size=4, max_size=4))
def test_any_box_that_is_not_refused_can_be_looked_at(numbers: list[float]) -> None:
    of = scene(codec_for("qwen3_vl", CoordinateFrame.UNIT), Modality.IMAGE, True)
    found = propose(ProposedCall("CropImage", {"bbox_2d": numbers}), TOOLS, of)
    if not isinstance(found, Refusal):
        [image] = found[0].run(found[1], IMAGE, 256).images
        assert image.pixels.shape == (16, 16, 3)


def test_minus_zero_is_zero_so_that_one_region_is_looked_at_in_one_way() -> None:
    of = scene(codec_for("qwen3_vl", CoordinateFrame.UNIT), Modality.IMAGE, False)
    views = []
    for zero in (0.0, -0.0):
        request = CropImage().check({"bbox_2d": [zero, zero, 0.5, 0.5]}, of)
        assert isinstance(request, ToolRequest)
        views.append(IMAGE.look(request.boxes[0], 256))
        cut = region((zero, zero, 9.0, 9.0), (128, 128), min_side=2.0)
        assert not isinstance(cut, Refusal)
        assert math.copysign(1, cut[0]) == math.copysign(1, cut[1]) == 1
    assert np.array_equal(*views)


def test_halves_of_a_character_in_arguments_are_the_same_once_they_were_written_down() -> None:
    # One half as an escape of the outer text, the other of the inner one.
    inner = r"{\"x\": \"\ud83d\\ude00\"}"
    text = f'<tool_call>{{"name": "CropImage", "arguments": "{inner}"}}</tool_call>'
    turn = codec_for("qwen3_vl").parse(text, False)
    assert turn.call is not None
    assert json.loads(json.dumps(turn.call.arguments)) == turn.call.arguments


# Each takes minutes where the time is that of the square of the length.
LONG = 500_000


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_thousands_of_answers_that_do_not_end_are_read_in_one_pass(family: str) -> None:
    assert codec_for(family).parse("<answer>" * LONG, False) == ParsedTurn()
    turn = codec_for(family).parse("<answer>" * 2 + "7</answer>" + "<answer>" * LONG, False)
    assert turn.answers == ("<answer>7",)


def test_a_call_after_an_answer_that_does_not_end_is_still_found() -> None:
    turn = codec_for("qwen3_vl").parse("<answer><answer><tool_call></tool_call>", False)
    assert turn.refusal is not None
    assert turn.refusal.reason is Reason.EMPTY_CALL


def test_a_name_given_twice_among_thousands_is_found_in_one_pass() -> None:
    names = ",".join(f'"a{i}":1' for i in range(LONG // 5))
    body = f'{{"name": "CropImage", "arguments": {{{names},"a{LONG // 5 - 1}":1}}}}'
    turn = codec_for("qwen3_vl").parse(f"<tool_call>{body}</tool_call>", False)
    assert turn.refusal is not None
    assert turn.refusal.reason is Reason.DUPLICATE_ARGUMENT
    assert f"'a{LONG // 5 - 1}'" in turn.refusal.message


@pytest.mark.parametrize("codec", CODECS[::3])
def test_brackets_nested_a_hundred_thousand_deep_are_refused(codec: Codec) -> None:
    opening = "</think>" if codec.opening.endswith("<think>\n") else ""
    for piece in ("[", '{"a":', "<function=A><parameter=x>[", "<tool_call>", "<think>"):
        text = f"{opening}<tool_call>{piece * 100_000}</tool_call>"
        turn = codec.parse(text, False)
        assert turn.refusal is not None
        assert is_reasoned(turn.refusal)
