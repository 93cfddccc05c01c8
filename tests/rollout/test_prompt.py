import dataclasses

import pytest

from grey_world import GreyVideo, video_sample
from reframe_vl.mini.world import MiniImage
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.prompt import PromptSettings, build_prompt, num_grids, prompt_tokens
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from reframe_vl.types import Modality
from scripted import sample
from tiny import FAMILIES, tokenizer, view_maker

PARTS = (
    codec_for("qwen3_vl"),
    Encoder(tokenizer()),
    ViewMaker(8, 1, 1, 256, 4096, (0.5,) * 3, (0.5,) * 3),
    [CropImage(), SelectFrames()],
)


@pytest.mark.parametrize("settings", [PromptSettings(view_pixels=1024), PromptSettings("Look.")])
def test_b24_a_prompts_tokens_are_known_from_sizes_alone(settings, monkeypatch):
    asked = dataclasses.replace(sample(), options=("one", "two"))
    built = build_prompt(asked, *PARTS, settings)
    monkeypatch.setattr(MiniImage, "look", lambda *_: pytest.fail("pixels were read"))
    tokens, visual = prompt_tokens(asked, *PARTS, settings)
    expected = (len(built.full), built.full.num_visual_tokens)
    # The mini's camera draws its own sizes, so only a budget that it meets is foreseen.
    if settings.view_pixels:
        assert (tokens, visual) == expected
    assert len(built.full) - len(built.text_only) == expected[1] + 2


def test_a_prompt_names_only_the_tools_of_its_modality():
    encoder = PARTS[1]
    text = encoder.decode(build_prompt(sample(), *PARTS, PromptSettings()).full.token_ids)
    assert "CropImage" in text and "SelectFrames" not in text
    bare = build_prompt(sample(), *PARTS, PromptSettings(show_tools=False))
    assert "CropImage" not in encoder.decode(bare.full.token_ids)


# --------------------------------------------------------------------------- videos


@pytest.mark.parametrize("num_frames", [1, 4, 5])
@pytest.mark.parametrize("video_as", ["frames", "video"])
@pytest.mark.parametrize("family", FAMILIES)
def test_b24_a_videos_tokens_are_known_from_sizes_alone(family, video_as, num_frames, monkeypatch):
    asked = video_sample("v", (1,) * num_frames, ((0,),), 1)
    settings = PromptSettings(frame_pixels=256, video_as=video_as)
    parts = (codec_for(family), Encoder(tokenizer()), view_maker(), [SelectFrames()], settings)
    built = build_prompt(asked, *parts).full
    monkeypatch.setattr(GreyVideo, "look", lambda *_: pytest.fail("pixels were read"))
    assert prompt_tokens(asked, *parts) == (len(built), built.num_visual_tokens)
    # One token a frame or temporal patch.
    assert built.num_visual_tokens == num_grids(asked.media, view_maker(), settings)
    assert built.num_visual_tokens == (num_frames if video_as == "frames" else -(-num_frames // 2))


@pytest.mark.parametrize(
    ("family", "video_as", "layout"),
    [
        ("qwen3_vl", "frames", ["<0.0 seconds>", "i", "<1.0 seconds>", "i", "<2.0 seconds>", "i"]),
        ("qwen3_vl", "video", ["<0.5 seconds>", "v", "<2.0 seconds>", "v"]),
        ("qwen3_5", "video", ["<0.5 seconds>", "v", "<2.0 seconds>", "v"]),
        ("qwen2_5_vl", "video", ["v"]),
    ],
)
def test_each_family_writes_a_video_in_its_own_form(family, video_as, layout):
    encoder = Encoder(tokenizer())
    settings = PromptSettings(frame_hint=False, video_as=video_as)
    asked = video_sample("v", (1, 2, 3), ((0,),), 1)
    built = build_prompt(asked, codec_for(family), encoder, view_maker(), [], settings)
    tags = {"i": "<|image_pad|>", "v": "<|video_pad|>"}
    expected = "".join(
        f"<|vision_start|>{tags[piece]}<|vision_end|>" if piece in tags else piece
        for piece in layout
    )
    assert f"user\n{expected}What digit is it?" in encoder.decode(built.full.token_ids)
    assert not built.text_only.views


def test_a_native_video_is_refused_where_there_is_none():
    asked = video_sample("v", (1, 2, 3), ((0,),), 1)
    settings = PromptSettings(video_as="video")
    codec, encoder, maker, tools = PARTS
    without = dataclasses.replace(codec, video=None)
    bare = Encoder(tokenizer())
    bare._placeholders[Modality.VIDEO] = None
    for parts in ((without, encoder), (codec, bare)):
        for make in (build_prompt, prompt_tokens):
            with pytest.raises(ValueError, match="video_as=frames"):
                make(asked, *parts, maker, tools, settings)
        # Images and frames need no form of videos.
        build_prompt(sample(), *parts, maker, tools, settings)
        build_prompt(asked, *parts, maker, tools, PromptSettings())


@pytest.mark.parametrize("video_as", ["frames", "video"])
def test_of_a_video_on_demand_only_facts_are_told(video_as, monkeypatch):
    monkeypatch.setattr(GreyVideo, "look", lambda *_: pytest.fail("pixels were read"))
    asked = video_sample("v", (1,) * 5, ((0,),), 1)
    settings = PromptSettings(on_demand_video=True, video_as=video_as, frame_hint=False)
    parts = (codec_for("qwen3_vl"), Encoder(tokenizer()), view_maker(), [SelectFrames()], settings)
    built = build_prompt(asked, *parts)
    assert not built.full.views and built.full == built.text_only
    assert prompt_tokens(asked, *parts) == (len(built.full), 0)
    text = PARTS[1].decode(built.full.token_ids)
    assert "The video lasts 5.0 s: 5 frames of 32x32 pixels, 1 a second." in text
    image = build_prompt(sample(), *parts)
    assert image.full.views and "lasts" not in PARTS[1].decode(image.full.token_ids)
