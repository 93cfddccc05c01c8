"""The mini model: a Qwen3-VL of about 0.3 million parameters, and its checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from reframe_vl.mini.world import VIEW_BUDGET

NUM_BASES = 3

PATCH_SIZE = 8
MIN_PIXELS = 256
HIDDEN = 64

ASSETS = Path(__file__).parent / "assets"

_IMAGE_PROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 1,
    "patch_size": PATCH_SIZE,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": VIEW_BUDGET},
    "temporal_patch_size": 1,
}
PROCESSOR_CONFIG = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor": {**_IMAGE_PROCESSOR, "image_processor_type": "Qwen2VLImageProcessor"},
    "video_processor": {
        **_IMAGE_PROCESSOR,
        "video_processor_type": "Qwen3VLVideoProcessor",
        "do_sample_frames": True,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 8,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": 8 * VIEW_BUDGET},
    },
}
"""Loads as the family's own processor; views of 16×16 to 32×32 pixels stay as they are."""


def base_folder(index: int) -> Path:
    """The folder of a shipped base checkpoint, loadable by transformers and vLLM.

    Raises:
        ValueError: There is no such base.
    """
    if not 0 <= index < NUM_BASES:
        raise ValueError(f"There is no base {index}: the shipped ones are 0 to {NUM_BASES - 1}.")
    return ASSETS / f"base_{index}"


def model_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLConfig:
    """The architecture, with the tokenizer's ids."""
    ids = tokenizer.get_vocab()
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": HIDDEN,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            # vLLM on CPU takes no head smaller than 32.
            "head_dim": 32,
            "initializer_range": 0.05,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": VIEW_BUDGET // PATCH_SIZE**2,
            "initializer_range": 0.05,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3VLForConditionalGeneration:
    """Makes a freshly initialised model; the deep-stack path begins as a no-op."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(model_config(tokenizer))
    for merger in model.model.visual.deepstack_merger_list:
        torch.nn.init.zeros_(merger.linear_fc2.weight)
        torch.nn.init.zeros_(merger.linear_fc2.bias)
    return model


def save_checkpoint(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Writes a folder that transformers and vLLM load: weights, tokenizer, processor."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    # Written for the owner alone, which would go into an installed package as it is.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR_CONFIG, indent=2) + "\n")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(settings, indent=2) + "\n")
