"""Tiny random models of the three families, with the mini's tokenizer, for exactness tests."""

from functools import lru_cache

import numpy as np
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.views import ViewMaker
from reframe_vl.types import Context, Provenance, Sampling, Span, View

FAMILIES = ("qwen3_5", "qwen3_vl", "qwen2_5_vl")


@lru_cache(maxsize=1)
def tokenizer():
    return build_tokenizer()


def view_maker(merge: int = 2, temporal: int = 2, patch: int = 8) -> ViewMaker:
    return ViewMaker(patch, merge, temporal, 256, 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def tiny_model(family: str, seed: int = 0, **text) -> VisionLanguageModel:
    tok = tokenizer()
    ids = {
        "image_token_id": tok.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tok.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tok.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tok.convert_tokens_to_ids("<|vision_end|>"),
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    common = {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "pad_token_id": tok.pad_token_id,
    } | text
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
    vision |= {"intermediate_size": 48, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"initializer_range": 0.1, "out_hidden_size": 32}
    torch.manual_seed(seed)
    if family == "qwen3_5":
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        # Wider weights make a random linear-attention stack chaotic: two orders of summation in
        # the plain forward then differ by more than the tests allow.
        common["initializer_range"] = 0.05
        layers = {"num_hidden_layers": 4, "full_attention_interval": 4, "head_dim": 16}
        config = Qwen3_5Config(
            text_config=common | linear | layers,
            vision_config=vision | {"num_position_embeddings": 16},
            **ids,
        )
        model = Qwen3_5ForConditionalGeneration(config)
    elif family == "qwen3_vl":
        text_config = common | {"num_hidden_layers": 2, "head_dim": 16}
        text_config["rope_parameters"] = rope | {
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        }
        extra = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config = Qwen3VLConfig(text_config=text_config, vision_config=vision | extra, **ids)
        model = Qwen3VLForConditionalGeneration(config)
    else:
        text_config = common | {"num_hidden_layers": 2}
        text_config["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}
        extra = {"window_size": 32, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision | extra, **ids)
        model = Qwen2_5_VLForConditionalGeneration(config)
    return VisionLanguageModel(model.float().train(), view_maker())


def random_view(rng: np.random.Generator, maker: ViewMaker, height=32, width=48) -> View:
    return maker.view(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def random_context(
    rng: np.random.Generator,
    maker: ViewMaker,
    turns: int = 2,
    lengths: tuple[int, int] = (1, 6),
    sizes=((32, 48), (16, 32), (48, 32)),
    images: bool = True,
) -> Context:
    """prompt, then turns of sampled tokens with observations between them."""
    image = tokenizer().convert_tokens_to_ids("<|image_pad|>")

    def text(n):
        return tuple(int(t) for t in rng.integers(20, 300, n))

    def block(provenance):
        if not images:
            return Span(provenance, text(3))
        size = sizes[rng.integers(len(sizes))]
        return Span(
            provenance, (*text(3), image, *text(2)), views=(random_view(rng, maker, *size),)
        )

    spans = [block(Provenance.PROMPT)]
    for turn in range(turns):
        sampled = text(int(rng.integers(*lengths)))
        spans.append(Span(Provenance.SAMPLED, sampled, logprobs=(0.0,) * len(sampled)))
        if turn + 1 < turns:
            spans.append(block(Provenance.OBSERVED))
    return Context(spans)


def sampling(temperature: float = 1.0, max_new_tokens: int = 6, **kw) -> Sampling:
    tok = tokenizer()
    banned = tok.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>"]
    )
    banned = (*banned, *range(len(tok), 384))
    stop = (tok.convert_tokens_to_ids("<|im_end|>"),)
    return Sampling(temperature, max_new_tokens, banned_ids=banned, stop_ids=stop, **kw)
