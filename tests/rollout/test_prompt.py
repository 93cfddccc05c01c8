import dataclasses

import pytest

from reframe_vl.mini.world import MiniImage
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.prompt import PromptSettings, build_prompt, prompt_tokens
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from scripted import sample
from tiny import tokenizer

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
