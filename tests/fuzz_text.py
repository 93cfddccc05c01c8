"""Strategies of turns near the border between readable and unreadable, and of plain noise."""

import re
from functools import cache

from hypothesis import strategies as st

from reframe_vl.tools.codec import Codec, codec_for
from reframe_vl.tools.coordinates import CoordinateFrame

FORMS = (
    {"family": "qwen3_vl"},
    {"family": "qwen3_vl", "compact": True},
    {"family": "qwen3_vl", "thinking": True},
    {"family": "qwen2_5_vl"},
    {"family": "qwen2_5_vl", "compact": True},
    {"family": "qwen3_5"},
    {"family": "qwen3_5", "thinking": True},
)
CODECS = tuple(codec_for(frame=frame, **form) for form in FORMS for frame in CoordinateFrame)

TAGS = ("<tool_call>", "<think>", "<answer>", "<function=CropImage>", "<parameter=bbox_2d>")
NUMBERS = ("0", "-0", "-0.0", "1", "7", "250", "999", "1000", "1001", "0.5", "1e-320", "-3", "3.0")
HUGE = ("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e15", "1e16", "9" * 4300, "9" * 5000)
STRANGE = (
    *("\\ud800", "\\ud83d\\ude00", "\\\\ude00", "\ud800", "\x00", "\u202e", "\ufeff", "\u2028"),
    *("\u0130", "\u0131", "\ufdfa", "e\u0301", "\U0001f600", "\u0663", "\ufffd", "\\u0000"),
)
SYNTAX = (*'{}[]:,"\\ \n<>/=|', '"name"', '"arguments"', '"bbox_2d"', '"frames"', "null", "true")
PIECES = (
    *TAGS,
    *("</tool_call>", "</think>", "</answer>", "</function>", "</parameter>", "<function=", "<|"),
    *("<Tool_Call>", "</TOOL_CALL>", "<Answer>", "<|im_end|>", "<|im_start|>", "<|image_pad|>"),
    *("CropImage", "SelectFrames", "Zoom", "answer", "the answer is", "**", "\\boxed{", "$", "_a "),
    *(*NUMBERS, *HUGE, *STRANGE, *SYNTAX),
)
_TOKEN = re.compile(r"</?\w+[=>]?|[\w.]+|\s+|.", re.DOTALL)

pieces = st.sampled_from(PIECES) | st.text(max_size=4)
noise = st.lists(pieces, max_size=20).map("".join)
repeated = st.builds(
    lambda piece, count, close: piece * count + close,
    st.sampled_from(PIECES).filter(lambda piece: len(piece) < 100),
    st.sampled_from((2, 40, 2_000)),
    pieces,
)
KINDS = ("insert", "delete", "double", "swap", "case", "cut")
changes = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.integers(1, 6), pieces), max_size=4
)


_numbers = st.integers(-50, 1100) | st.floats(-0.2, 1.2) | st.sampled_from((-0.0, 1e300, 10**40))
_ordered = st.tuples(*[st.integers(0, 400)] * 2, *[st.integers(500, 1000)] * 2).map(list)
_boxes = _ordered | st.just([0.0, 0.25, 0.5, 1.0]) | st.lists(_numbers, min_size=4, max_size=4)
_frames = st.lists(st.integers(0, 5), min_size=1, max_size=4) | st.lists(st.integers(-1, 9))
_any = st.integers(0, 5) | st.text(max_size=5) | st.lists(st.booleans(), max_size=2)
_calls = (
    st.tuples(st.just("CropImage"), st.fixed_dictionaries({"bbox_2d": _boxes}))
    | st.tuples(st.just("SelectFrames"), st.fixed_dictionaries({"frames": _frames}))
    | st.tuples(
        st.sampled_from(("CropImage", "SelectFrames", "cropimage", "")),
        st.dictionaries(st.sampled_from(("bbox_2d", "frames", "x")), _any),
    )
)


def _write(codec: Codec, kind: str, called: tuple[str, dict[str, object]], words: str) -> str:
    end = "<|im_end|>"
    call, answer = codec.render_call(*called), codec.render_answer(words)
    return {
        "call": call,
        "answer": answer,
        "both": call.removesuffix(end) + answer,
        "two calls": call.removesuffix(end) + call,
        "thought": f"<think>{call.removesuffix(end)}</think>{answer}",
    }[kind]


def _changed(text: str, edits: list[tuple[str, int, int, str]]) -> str:
    tokens = _TOKEN.findall(text)
    for kind, at, length, piece in edits:
        at = at * len(tokens) // 100
        part = tokens[at : at + length]
        if kind == "insert":
            tokens.insert(at, piece)
        elif kind == "delete":
            del tokens[at : at + length]
        elif kind == "double":
            tokens[at:at] = part
        elif kind == "swap":
            tokens[at : at + length] = part[::-1]
        elif kind == "case":
            tokens[at : at + length] = [token.swapcase() for token in part]
        else:
            del tokens[at:]
    return "".join(tokens)


@cache
def turns(codec: Codec) -> st.SearchStrategy[str]:
    """Valid turns, a few changes away from one, and noise inside tags and out of them."""
    kinds = st.sampled_from(("call", "call", "call", "answer", "both", "two calls", "thought"))
    valid = st.builds(_write, st.just(codec), kinds, _calls, noise)
    wrapped = st.builds(
        lambda before, tag, body, close: f"{before}<{tag}>{body}{f'</{tag}>' * close}",
        st.just("") | noise,
        st.sampled_from(("tool_call", "tool_call", "answer", "think")),
        noise | repeated,
        st.booleans(),
    )
    changed = st.builds(_changed, valid, changes)
    written = valid | changed | changed | changed | wrapped | wrapped | noise | repeated
    if not codec.opening.endswith("<think>\n"):
        return written
    return st.builds(str.__add__, st.sampled_from(("</think>", "so</think>\n\n", "")), written)
