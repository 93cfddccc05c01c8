"""Native videos against the library's own way of feeding them, built slowly and obviously."""

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from reframe_vl.policy.score import score
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.prompt import PromptSettings, build_prompt
from reframe_vl.tools.codec import codec_for
from reframe_vl.types import (
    Answer,
    Context,
    Modality,
    Provenance,
    Quoted,
    Sample,
    Sampling,
    Span,
    VideoMedia,
)
from tiny import FAMILIES, sampling, tiny_model, tokenizer, view_maker

QUESTION = "When does it turn?"
CAPTION = "<1.5 seconds>"
WORDS = (*range(40, 60),)


@dataclass(frozen=True)
class Clip(VideoMedia):
    """Random frames at the size at which they are fed."""

    num_frames: int
    fps: float = 1.0
    height: int = 32
    width: int = 48

    @property
    def key(self):
        return str(self)

    @property
    def size(self):
        return (self.width, self.height)

    @property
    def timestamps_s(self):
        return tuple(i / self.fps for i in range(self.num_frames))

    def look(self, frames, max_pixels):
        shape = (self.height, self.width, 3)
        rngs = [np.random.default_rng([self.num_frames, frame]) for frame in frames]
        return [rng.integers(0, 256, shape, dtype=np.uint8) for rng in rngs]


CLIPS = [
    Clip(1),
    Clip(2, fps=0.5),
    Clip(3),
    # Times that are no whole number of positions; a video longer than its sides.
    Clip(7, fps=3.0),
    Clip(12, height=16, width=32),
]
STILL = Clip(99).look([5], 0)[0]


def prompt(family, clip):
    sample = Sample("v", Modality.VIDEO, clip, QUESTION, Answer("open", "then"))
    settings = PromptSettings(frame_hint=False, video_as="video")
    encoder = Encoder(tokenizer())
    return build_prompt(sample, codec_for(family), encoder, view_maker(), [], settings).full


def observed(family):
    """What SelectFrames returns: a still image after its time."""
    parts = codec_for(family).observation([Quoted(CAPTION), view_maker().view(STILL)])
    return Encoder(tokenizer()).span(parts, Provenance.OBSERVED)


def sampled(ids):
    return Span(Provenance.SAMPLED, tuple(ids), logprobs=(0.0,) * len(ids))


def context(family, clip):
    """A native video, a turn, a selected frame as an image, a turn."""
    return Context([prompt(family, clip), sampled(WORDS[:5]), observed(family), sampled(WORDS[5:])])


# --------------------------------------------------------------------------- the slow way


def library_text(family, clip, grid_thw, image_grid):
    """The context as text with every placeholder, by the processors' own replacements."""
    merge = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor = SimpleNamespace(
        image_processor=merge,
        video_processor=merge,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=lambda *args: Qwen3VLProcessor._calculate_timestamps(None, *args),
    )
    metadata = SimpleNamespace(fps=clip.fps, frames_indices=list(range(clip.num_frames)))
    videos = {"video_grid_thw": grid_thw, "video_metadata": [metadata]}
    kind = Qwen2_5_VLProcessor if family == "qwen2_5_vl" else Qwen3VLProcessor
    video = kind.replace_video_token(processor, videos, 0)
    if family == "qwen2_5_vl":
        video = f"<|vision_start|>{video}<|vision_end|>"
    image = kind.replace_image_token(processor, {"image_grid_thw": image_grid}, 0)
    opening = codec_for(family).opening
    return (
        f"<|im_start|>user\n{video}{QUESTION}<|im_end|>\n<|im_start|>assistant\n{opening}",
        f"\n<|im_start|>user\n<tool_response>\n{CAPTION}<|vision_start|>{image}<|vision_end|>"
        f"\n</tool_response><|im_end|>\n<|im_start|>assistant\n{opening}",
    )


def library_inputs(family, clip):
    """What the library's forward takes for ``context``."""
    frames = np.stack(clip.look(range(clip.num_frames), 0)).astype(np.float32)
    video = torch.from_numpy((frames / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)[None]
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, video, 8, 2, 2)
    grid_thw = torch.tensor([grid])
    images = Qwen2VLImageProcessorPil(
        patch_size=8,
        size={"shortest_edge": 256, "longest_edge": 4096},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )(images=[Image.fromarray(STILL)], return_tensors="pt")
    tok = tokenizer()
    texts = library_text(family, clip, grid_thw, images["image_grid_thw"])
    first, second = (tok(text, add_special_tokens=False)["input_ids"] for text in texts)
    ids = torch.tensor([[*first, *WORDS[:5], *second, *WORDS[5:]]])
    pads = tok.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == pads[0]).int() + 2 * (ids == pads[1]).int(),
        "pixel_values": images["pixel_values"],
        "image_grid_thw": images["image_grid_thw"],
        "pixel_values_videos": patches[0],
        "video_grid_thw": grid_thw,
    }
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([2 / clip.fps])
    return inputs


def library_logprobs(model, inputs, trained):
    with torch.no_grad():
        table = model.base(**inputs).logits[0].float().log_softmax(-1)
    return table[torch.from_numpy(trained) - 1, inputs["input_ids"][0, trained]]


# --------------------------------------------------------------------------- equality


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: f"{clip.num_frames}-frames")
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_positions_patches_and_logprobs_equal_the_librarys(family, clip):
    model = tiny_model(family).eval()
    inputs = library_inputs(family, clip)
    shown = context(family, clip)
    row = model.expand(shown)
    assert row.token_ids.tolist() == inputs["input_ids"][0].tolist()
    np.testing.assert_array_equal(row.image_mask, inputs["mm_token_type_ids"][0].numpy() > 0)
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    positions, _ = model.base.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        **{name: inputs[name] for name in names if name in inputs},
    )
    np.testing.assert_array_equal(row.positions, positions[:, 0].numpy())
    assert row.next_position == row.positions[0, -1] + 1
    patches = model.view_maker.patches(shown.views)
    expected = np.concatenate([inputs["pixel_values_videos"], inputs["pixel_values"]])
    np.testing.assert_allclose(patches, expected, atol=2e-6)
    ours = score(model, [shown], Sampling()).logprobs_T.detach()
    theirs = library_logprobs(model, inputs, row.trained)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_native_video_changes_no_score(family):
    model = tiny_model(family).eval()
    prompts = [prompt(family, clip) for clip in CLIPS[2:4]]
    rng = np.random.default_rng(0)
    contexts = []
    for first in prompts:
        for length in (3, 9, 20):
            turns = [sampled([int(t) for t in rng.integers(20, 300, length)]) for _ in range(2)]
            contexts.append(Context([first, turns[0], observed(family), turns[1]]))
            contexts.append(Context([first, turns[1]]))
    how = sampling(0.8)
    shared, plain = (score(model, contexts, how, share_prefixes=s) for s in (True, False))
    torch.testing.assert_close(shared.logprobs_T, plain.logprobs_T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_from_the_distribution_that_is_scored(family):
    model = tiny_model(family)
    engine = HFEngine(model)
    how = sampling(max_new_tokens=8)

    async def play(number, spans):
        for turn in range(2):
            drawn = await engine.generate(
                f"s{number}", Context(spans), how, seed=10 * number + turn
            )
            spans.append(Span(Provenance.SAMPLED, drawn.token_ids, logprobs=drawn.logprobs))
            if turn == 0:
                spans.append(observed(family))
        engine.release(f"s{number}")
        return Context(spans)

    async def play_all():
        engine.open([f"s{i}" for i in range(4)])
        starts = [[prompt(family, CLIPS[2 + i % 2])] for i in range(4)]
        return await asyncio.gather(*(play(i, spans) for i, spans in enumerate(starts)))

    contexts = asyncio.run(play_all())
    found = [x for c in contexts for s in c.spans if s.trained for x in s.logprobs]
    with torch.no_grad():
        expected = score(model.eval(), contexts, how).logprobs_T
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)


def test_one_frame_a_temporal_patch_is_fed_as_the_frame_itself():
    """As the mini model has it: only the placeholder differs from an image."""
    maker = view_maker(merge=1, temporal=1)
    (frame,) = Clip(1).look([0], 0)
    video, image = maker.video([frame], [0.0]), maker.view(frame)
    assert (video.grid_thw, video.num_tokens) == (image.grid_thw, image.num_tokens)
    np.testing.assert_array_equal(maker.patches([video]), maker.patches([image]))
    assert video.hash != image.hash


def test_a_family_of_single_temporal_patches_refuses_a_block_of_several():
    model = tiny_model("qwen3_vl")
    with pytest.raises(ValueError, match=r"2 temporal patches.*model\.family"):
        model.expand(Context([prompt("qwen2_5_vl", Clip(3))]))


def test_an_image_in_the_place_of_a_video_is_refused():
    model = tiny_model("qwen3_vl")
    span = prompt("qwen3_vl", Clip(2))
    with pytest.raises(ValueError, match="placeholders"):
        model.expand(Context([replace(span, views=(view_maker().view(STILL),))]))
