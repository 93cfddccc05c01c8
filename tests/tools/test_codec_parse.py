from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.tools.base import Reason
from reframe_vl.tools.codec import Codec, codec_for
from reframe_vl.tools.turns import ParsedTurn

JSON, XML = codec_for("qwen3_vl"), codec_for("qwen3_5")
CODECS = [JSON, codec_for("qwen3_vl", compact=True), codec_for("qwen2_5_vl"), XML]
CROP = {"bbox_2d": [125, 250, 375, 500]}


def wrap(body: str) -> str:
    return f"<tool_call>{body}</tool_call><|im_end|>"


def reason(codec: Codec, text: str, truncated: bool = False) -> Reason | None:
    turn = codec.parse(text, truncated)
    assert turn.call is None
    return turn.refusal.reason if turn.refusal else None


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,11}", fullmatch=True)
words = st.text(st.characters(codec="utf-8", exclude_characters="<|"), max_size=20)
numbers = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(CODECS[:3]), names, st.dictionaries(words, values, max_size=4), words)
def test_json_calls_round_trip(
    codec: Codec, name: str, arguments: dict[str, Any], before: str
) -> None:
    turn = codec.parse(before + codec.render_call(name, arguments), False)
    assert turn.call is not None
    assert (turn.call.name, turn.call.arguments) == (name, arguments)
    assert turn.call_start == len(before)


structured = st.lists(values, max_size=4) | st.dictionaries(words, values, max_size=3) | numbers


@given(names, st.dictionaries(names, structured, max_size=4))
def test_xml_calls_round_trip(name: str, arguments: dict[str, Any]) -> None:
    turn = XML.parse(XML.render_call(name, arguments), False)
    assert turn.call is not None
    assert (turn.call.name, turn.call.arguments) == (name, arguments)


def test_xml_text_that_is_no_json_stays_text() -> None:
    arguments = {"code": "for x in y:\n    print(x)\n", "word": "Infinity war", "list": "[NaN]"}
    turn = XML.parse(XML.render_call("Run", arguments), False)
    assert turn.call is not None
    assert turn.call.arguments == arguments


@given(words)
def test_answers_round_trip(text: str) -> None:
    for codec in CODECS:
        turn = codec.parse(codec.render_answer(text), False)
        assert turn == ParsedTurn(answers=(text.strip(),))


CALL = '{"name": "CropImage", "arguments": {"bbox_2d": [1, 2, 3, 4]}}'
FUNCTION = "<function=CropImage><parameter=bbox_2d>[1, 2, 3, 4]</parameter></function>"


@pytest.mark.parametrize(
    ("body", "due"),
    [
        ("", Reason.EMPTY_CALL),
        (" \n ", Reason.EMPTY_CALL),
        ('{"arguments": {"bbox_2d": [1, 2, 3, 4]}}', Reason.NO_NAME),
        ('{"name": "", "arguments": {}}', Reason.NO_NAME),
        ('{"name": 7, "arguments": {}}', Reason.NO_NAME),
        ("{}", Reason.NO_NAME),
        (CALL + CALL, Reason.TRAILING_TEXT),
        (CALL + "\n" + CALL, Reason.TRAILING_TEXT),
        (CALL + " and more", Reason.TRAILING_TEXT),
        ("CropImage(1, 2, 3, 4)", Reason.NOT_JSON),
        (CALL[:-1], Reason.NOT_JSON),
        (CALL.replace('"', "'"), Reason.NOT_JSON),
        (FUNCTION, Reason.NOT_JSON),
        ("[" * 100_000, Reason.NOT_JSON),
        ("[" * 100 + "]" * 100, Reason.NOT_JSON),
        ('{"name": "CropImage", "arguments": {"bbox_2d": [' + "9" * 5000 + "]}}", Reason.NOT_JSON),
        (f"[{CALL}]", Reason.NOT_AN_OBJECT),
        ("7", Reason.NOT_AN_OBJECT),
        ("null", Reason.NOT_AN_OBJECT),
        ('{"name": "CropImage", "arguments": "[1, 2"}', Reason.BAD_ARGUMENTS_JSON),
        ('{"name": "CropImage", "arguments": "{} {}"}', Reason.BAD_ARGUMENTS_JSON),
        (CALL.replace("1", "NaN"), Reason.WRONG_TYPE),
        (CALL.replace("1", "-Infinity"), Reason.WRONG_TYPE),
        (CALL.replace("1", "1e999"), Reason.WRONG_TYPE),
        ('{"name": "A", "arguments": {"x": 1, "x": 2}}', Reason.DUPLICATE_ARGUMENT),
    ],
)
def test_a01_a02_each_fault_of_a_json_call_has_its_reason(body: str, due: Reason) -> None:
    assert reason(JSON, wrap(body)) is due


@pytest.mark.parametrize(
    ("body", "due"),
    [
        ("", Reason.EMPTY_CALL),
        ("<parameter=bbox_2d>[1, 2, 3, 4]</parameter>", Reason.NO_NAME),
        ("<function=></function>", Reason.NO_NAME),
        (FUNCTION + FUNCTION, Reason.TRAILING_TEXT),
        (FUNCTION + "so", Reason.TRAILING_TEXT),
        (CALL, Reason.NOT_XML),
        ("<function=CropImage", Reason.NOT_XML),
        ("<function=CropImage>", Reason.NOT_XML),
        ("<function=CropImage>[1, 2, 3, 4]</function>", Reason.NOT_XML),
        ("<function=CropImage><parameter=bbox_2d>[1, 2, 3, 4]</function>", Reason.NOT_XML),
        ("<function=CropImage><parameter=>1</parameter></function>", Reason.NOT_XML),
        (
            "<function=A><parameter=x>1</parameter><parameter=x>2</parameter></function>",
            Reason.DUPLICATE_ARGUMENT,
        ),
    ],
)
def test_a01_a02_each_fault_of_an_xml_call_has_its_reason(body: str, due: Reason) -> None:
    assert reason(XML, wrap(body)) is due


@pytest.mark.parametrize("codec", CODECS)
def test_a02_cut_call_is_told_apart_from_an_unclosed_one(codec: Codec) -> None:
    cut = "I look. " + codec.render_call("CropImage", CROP).split(", 375")[0].split(",375")[0]
    assert reason(codec, cut, truncated=True) is Reason.TRUNCATED_CALL
    assert reason(codec, cut + "<|im_end|>") is Reason.UNCLOSED_CALL
    assert codec.parse(cut, True).call_start == len("I look. ")


def test_a02_complete_call_of_a_cut_turn_is_read() -> None:
    text = JSON.render_call("CropImage", CROP).removesuffix("<|im_end|>")
    assert JSON.parse(text + "\nand th", True).call is not None


@pytest.mark.parametrize(
    "arguments", ['"arguments": ""', '"arguments": " "', '"arguments": {}', '"id": 1']
)
def test_a04_empty_arguments_are_an_empty_mapping(arguments: str) -> None:
    turn = JSON.parse(wrap(f'{{"name": "CropImage", {arguments}}}'), False)
    assert turn.call is not None
    assert turn.call.arguments == {}


def test_a04_xml_call_without_parameters_is_an_empty_mapping() -> None:
    turn = XML.parse(wrap("<function=CropImage>\n</function>"), False)
    assert turn.call is not None
    assert turn.call.arguments == {}


def test_arguments_that_were_encoded_once_more_are_accepted() -> None:
    turn = JSON.parse(wrap(r'{"name": "A", "arguments": "{\"frames\": [1]}"}'), False)
    assert turn.call is not None
    assert turn.call.arguments == {"frames": [1]}


@pytest.mark.parametrize("arguments", ["[1, 2, 3, 4]", "7", "null", '"[1, 2]"'])
def test_a03_arguments_that_are_no_mapping_keep_the_tool_s_name(arguments: str) -> None:
    turn = JSON.parse(wrap(f'{{"name": "CropImage", "arguments": {arguments}}}'), False)
    assert turn.call is not None
    assert turn.call.name == "CropImage"
    assert not isinstance(turn.call.arguments, dict)


def test_name_with_half_a_character_can_be_written_to_a_file() -> None:
    turn = JSON.parse(wrap(r'{"name": "a\ud800", "arguments": {}}'), False)
    assert turn.call is not None
    turn.call.name.encode()


@pytest.mark.parametrize("codec", CODECS)
def test_turn_with_several_calls_or_an_answer_beside_is_refused(codec: Codec) -> None:
    call = codec.render_call("CropImage", CROP).removesuffix("<|im_end|>")
    assert reason(codec, f"{call}\n{call}<|im_end|>") is Reason.SEVERAL_CALLS
    assert reason(codec, f"{call}<tool_call>", truncated=True) is Reason.SEVERAL_CALLS
    for text in (f"{call}<answer>3</answer>", f"<answer>3</answer>{call}"):
        turn = codec.parse(text, False)
        assert turn.refusal is not None
        assert turn.refusal.reason is Reason.CALL_WITH_ANSWER
        assert turn.answers == ("3",)


def test_d15_all_answer_blocks_are_listed() -> None:
    text = "<answer> A </answer> or <answer>B</answer> <answer>cut"
    assert JSON.parse(text, True) == ParsedTurn(answers=("A", "B"))


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("it is a dog", ()),
        ("Answer: D, not <answer>", ()),
        ("I considered (A) ... <answer>\nD\n</answer>", ("D",)),
        ("<answer>None of the above</answer>", ("None of the above",)),
        ("<answer></answer>", ("",)),
    ],
)
def test_d10_d11_d12_only_answer_blocks_hold_answers(text: str, answers: tuple[str, ...]) -> None:
    assert JSON.parse(text, False) == ParsedTurn(answers=answers)


@pytest.mark.parametrize("codec", CODECS)
def test_think_blocks_are_ignored(codec: Codec) -> None:
    call = codec.render_call("CropImage", CROP).removesuffix("<|im_end|>")
    inside = f"<think>{call}<answer>A</answer></think>"
    assert codec.parse(f"{inside}<answer>B</answer>", False) == ParsedTurn(answers=("B",))
    assert codec.parse(f"<think>{call} and on", True) == ParsedTurn()
    assert codec.parse(f"{inside}{call}", False).call_start == len(inside)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_think_block_that_the_prompt_opened_is_ignored(family: str) -> None:
    codec = codec_for(family, thinking=True)
    assert codec.parse("maybe <answer>A</answer>", False) == ParsedTurn()
    text = "maybe <answer>A</answer></think><answer>B</answer>"
    assert codec.parse(text, False) == ParsedTurn(answers=("B",))
    call = "</think>\n\n" + codec.render_call("CropImage", CROP)
    assert codec.parse(call, False).call is not None


def test_call_inside_an_answer_is_text() -> None:
    assert JSON.parse("<answer><tool_call></answer>", False) == ParsedTurn(answers=("<tool_call>",))


def test_what_follows_the_end_of_the_turn_is_not_read() -> None:
    assert JSON.parse("no<|im_end|><answer>A</answer>", False) == ParsedTurn()


TAGS = ("tool_call", "think", "answer", "function", "parameter")
pieces = st.sampled_from(
    [
        *(f"<{tag}>" for tag in TAGS),
        *(f"</{tag}>" for tag in TAGS),
        *("<function=A>", "<function=", "<parameter=x>", "<|im_end|>"),
        *'{}[]:,"\\',
        *("\\ud800", "NaN", "1e999", "null", '"name"', '"arguments"', "12"),
    ]
)
fuzz = st.lists(pieces | st.text(max_size=6), max_size=25).map("".join)


@given(st.sampled_from([*CODECS, codec_for("qwen3_5", thinking=True)]), fuzz, st.booleans())
def test_any_text_is_read_without_raising(codec: Codec, text: str, truncated: bool) -> None:
    for written in (text, wrap(text), "</think>" + wrap(text)):
        turn = codec.parse(written, truncated)
        assert turn.call is None or turn.refusal is None


@given(st.sampled_from(CODECS), st.integers(0, 140), st.integers(0, 140), fuzz, st.booleans())
def test_mutated_calls_are_read_without_raising(
    codec: Codec, start: int, stop: int, patch: str, truncated: bool
) -> None:
    text = codec.render_call("CropImage", CROP)
    turn = codec.parse(text[:start] + patch + text[stop:], truncated)
    assert turn.call is None or turn.refusal is None
