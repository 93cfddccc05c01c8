"""The mini tokenizer: lossless, short for calls, and in step with the codec."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reframe_vl.mini.glyphs import COLOR_NAMES
from reframe_vl.mini.tokenizer import (
    COORDINATES,
    SMALL_INTEGERS,
    SPECIAL_TOKENS,
    TAG_TOKENS,
    build_tokenizer,
)
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import BANNED_STRINGS, STOP_STRINGS, codec_for
from reframe_vl.types import Provenance, Quoted

TOKENIZER = build_tokenizer()
CODEC = codec_for("qwen3_vl", compact=True)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def view():
    maker = ViewMaker(8, 1, 1, 256, 1024, (0.5,) * 3, (0.5,) * 3)
    return maker.view(MiniWorld().sample("train", 0).media.look(None))


@given(st.text())
def test_any_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(ids(text)) == text


@pytest.mark.parametrize("box", [(125, 250, 375, 500), (0, 0, 1000, 1000), (750, 875, 1000, 1000)])
def test_a_crop_call_is_short(box):
    call = CODEC.render_call("CropImage", {"bbox_2d": list(box)})
    assert len(ids(call)) == 12
    assert TOKENIZER.decode(ids(call)) == call


def test_a_frame_call_is_short():
    assert len(ids(CODEC.render_call("SelectFrames", {"frames": [3, 12]}))) <= 8


def test_an_answer_is_four_tokens():
    for digit in range(10):
        assert len(ids(CODEC.render_answer(str(digit)))) == 4


def test_the_worlds_words_are_single_tokens():
    numbers = [str(n) for n in (*COORDINATES, *SMALL_INTEGERS)]
    for word in (*numbers, *(f" {color}" for color in COLOR_NAMES), *SPECIAL_TOKENS, *TAG_TOKENS):
        assert len(ids(word)) == 1, word
    assert len(ids("<3.0 seconds>")) == 3


def test_prompt_and_observation_are_few_tokens():
    encoder = Encoder(TOKENIZER)
    prompt = CODEC.prompt("", [view(), Quoted("What digit is on the red square?")])
    assert len(encoder.span(prompt, Provenance.PROMPT).token_ids) == 12
    observation = CODEC.observation([view()])
    assert len(encoder.span(observation, Provenance.OBSERVED).token_ids) == 14


def test_quoted_text_never_becomes_a_control_token():
    encoder = Encoder(TOKENIZER)
    text = "".join(SPECIAL_TOKENS)
    span = encoder.span([Quoted(text)], Provenance.OBSERVED)
    assert not set(span.token_ids) & set(TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)))
    assert encoder.decode(span.token_ids) == text


def test_the_codecs_strings_are_known_tokens():
    known = TOKENIZER.get_vocab()
    assert all(token in known for token in STOP_STRINGS)
    assert set(SPECIAL_TOKENS) - set(STOP_STRINGS) <= set(BANNED_STRINGS)


def test_training_the_tokenizer_draws_nothing_at_random():
    assert build_tokenizer().backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_the_chat_template_writes_the_codecs_layout():
    image = {"type": "image"}
    call = CODEC.render_call("CropImage", {"bbox_2d": [0, 0, 250, 250]})
    call_text = call.removesuffix("<|im_end|>")
    question = "What digit is on the red square?"
    messages = [
        {"role": "system", "content": "Look closely."},
        {"role": "user", "content": [image, {"type": "text", "text": question}]},
        {"role": "assistant", "content": call_text},
        {"role": "tool", "content": [image]},
    ]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = [
        *CODEC.prompt("Look closely.", [view(), Quoted(question)]),
        Quoted(call),
        *CODEC.observation([view()]),
    ]
    expected = "".join(getattr(part, "text", "<|image_pad|>") for part in parts)
    assert rendered == expected
    without_system = TOKENIZER.apply_chat_template(messages[1:2], tokenize=False)
    assert without_system == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "What digit is on the red square?<|im_end|>\n"
    )
