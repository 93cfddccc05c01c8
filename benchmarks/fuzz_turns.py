"""Turns that a policy could write: near the border between readable and unreadable, and noise."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from typing import Any

import common

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.tools.codec import TURN_CLOSE, Codec
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.types import Modality

LONGEST = 50_000
NUMBERS = (
    *("0", "-0", "-0.0", "1", "999", "1001", "0.5", "-3", "3.0", "true", "NaN", "Infinity"),
    *("-Infinity", "1e400", "-1e400", "1e-320", "1e15", "1e16", "9" * 4300, "9" * 5000),
)
CHARACTERS = (
    *("\\ud800", "\\ud83d\\ude00", "\ud800", "\x00", "\\u0000", "\u202e", "\ufeff", "\u2028"),
    *("\u0130", "\u0131", "\u0663", "\ufdfa", "e\u0301", "\U0001f600", "\ufffd", "½", "²"),
)
TAGS = ("tool_call", "think", "answer", "function", "parameter")
SYNTAX = (*'{}[]:,"\\ \n<>/=|', '"name"', '"arguments"', '"bbox_2d"', '"frames"', "null", '\\"')
WORDS = (
    *("CropImage", "SelectFrames", "bbox_2d", "frames", "A", "B)", "7", "the answer is", "not "),
    *("**", "*a ", "_a ", "`a ", "\\boxed{", "\\(", "$", "million", "so ", "1,000", "cm"),
)
PIECES = (
    *(f"<{tag}>" for tag in TAGS),
    *(f"</{tag}>" for tag in TAGS),
    *("<function=", "<function=CropImage>", "<parameter=", "<parameter=bbox_2d>", "<|im_end|>"),
    *("<Tool_Call>", "</ANSWER>", "<|im_start|>", "<|image_pad|>", "<|"),
    *(*NUMBERS, *CHARACTERS, *SYNTAX, *WORDS),
)
_TOKEN = re.compile(r"</?\w+[=>]?|[\w.]+|\s+|.", re.DOTALL)


def box(rng: random.Random, frame: CoordinateFrame) -> list[Any]:
    """Mostly a valid box of a frame."""
    right, bottom = frame.extent((32, 32))
    xs, ys = (sorted(rng.uniform(-0.1, 1.1) * end for _ in range(2)) for end in (right, bottom))
    values: list[Any] = [xs[0], ys[0], xs[1], ys[1]]
    if frame.integral or rng.random() < 0.1:
        values = [round(value) for value in values]
    if rng.random() < 0.15:
        values[rng.randrange(4)] = rng.choice((0, -0.0, 1e300, math.nan, 10**40, "7", None, [1]))
    if rng.random() < 0.1:
        rng.shuffle(values)
    return values if rng.random() < 0.97 else values[: rng.randrange(4)]


def odd(rng: random.Random, call: str) -> str:
    """A call whose arguments are text, no object, or given twice."""
    pattern = r'("arguments": ?)(\{.*?\})'
    match rng.randrange(3):
        case 0:
            end = rng.choice((None, None, -1))
            return re.sub(pattern, lambda found: found[1] + json.dumps(found[2][:end]), call)
        case 1:
            return re.sub(pattern, r"\g<1>[1]", call)
        case _:
            twice = re.sub(r'"(?:bbox_2d|frames)": ?', r"\g<0>1, \g<0>", call)
            return re.sub(r"<parameter=\w+>", r"\g<0>1</parameter>\g<0>", twice)


def valid(rng: random.Random, codec: Codec, modality: Modality) -> str:
    """A turn in the codec's own form, or nearly so."""
    if (modality is Modality.IMAGE) is (rng.random() < 0.9):
        name, arguments = "CropImage", {"bbox_2d": box(rng, codec.frame)}
    else:
        count = rng.choice((0, 1, 1, 2, 2, 3, 5))
        name, arguments = "SelectFrames", {"frames": rng.choices(range(-1, 12), k=count)}
    call = codec.render_call(name, arguments)
    if rng.random() < 0.05:
        call = odd(rng, call)
    answer = codec.render_answer(rng.choice((*WORDS, "B", "a dog", "5 million", "2(x + 2)")))
    open_call = call.removesuffix(TURN_CLOSE)
    mixed = (open_call + answer, open_call + call, f"<think>{open_call}</think>{answer}")
    return rng.choice((call, call, call, call, answer, answer, *mixed))


def noise(rng: random.Random) -> str:
    """Pieces and characters without order."""
    return "".join(
        rng.choice(PIECES) if rng.random() < 0.8 else chr(rng.randrange(0x11_0000))
        for _ in range(rng.randrange(25))
    )


def changed(rng: random.Random, text: str) -> str:
    """A few tokens of a text removed, added, repeated, reversed, in other case, or cut off."""
    tokens = _TOKEN.findall(text)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(tokens) + 1)
        end = at + rng.randint(1, 6)
        match rng.randrange(7):
            case 0:
                del tokens[at:end]
            case 1 | 2:
                tokens.insert(at, rng.choice(PIECES))
            case 3:
                tokens[at:at] = tokens[at:end]
            case 4:
                tokens[at:end] = tokens[at:end][::-1]
            case 5:
                tokens[at:end] = [token.swapcase() for token in tokens[at:end]]
            case 6 if rng.random() < 0.5:
                del tokens[at:]
    return "".join(tokens)


def wrapped(rng: random.Random, body: str) -> str:
    """A text inside the tags of a block, which need not close."""
    tag = rng.choice(("tool_call", "tool_call", "answer", "answer", "think"))
    return f"<{tag}>{body}" + f"</{tag}>" * (rng.random() < 0.8)


def repeated(rng: random.Random) -> str:
    """A short text again and again."""
    piece = "".join(rng.choices(PIECES, k=rng.randint(1, 3)))
    length = LONGEST ** rng.uniform(0.6, 1.0)
    return piece * int(length / len(piece)) + rng.choice(PIECES)


def turn(rng: random.Random, codec: Codec, modality: Modality) -> str:
    """A fuzzed turn."""
    style = rng.random()
    if style < 0.7:
        text = changed(rng, valid(rng, codec, modality))
    elif style < 0.9:
        text = wrapped(rng, noise(rng))
    elif style < 0.99:
        text = noise(rng)
    else:
        text = wrapped(rng, repeated(rng)) if rng.random() < 0.7 else repeated(rng)
    if codec.opening.endswith("<think>\n") and rng.random() < 0.9:
        text = f"hm</think>{text}"
    return text
