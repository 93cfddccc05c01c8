"""Tiny checkpoints that vLLM loads on a CPU, and rollouts of them with everything that happens."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from reframe_vl.mini.model import PROCESSOR_CONFIG, save_checkpoint
from reframe_vl.policy.score import score
from reframe_vl.types import Context, Provenance, Span
from tiny import random_context, random_view, tokenizer

CPU = torch.device("cpu")
ARGUMENTS = {
    "max_model_len": 512,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "disable_log_stats": True,
}


def write_checkpoint(folder, tied=False, seed=0):
    """A Qwen3-VL whose images and videos are cut as the released ones' are: 2x2x2 patches."""
    tok = tokenizer()
    ids = tok.get_vocab()
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "initializer_range": 0.1,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
            "pad_token_id": tok.pad_token_id,
            "eos_token_id": tok.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "initializer_range": 0.1,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    save_checkpoint(Qwen3VLForConditionalGeneration(config), tok, folder)
    settings = json.loads(json.dumps(PROCESSOR_CONFIG))
    for part in settings.values():
        if isinstance(part, dict):
            part |= {"merge_size": 2, "patch_size": 8, "temporal_patch_size": 2}
            part["size"] = {"shortest_edge": 256, "longest_edge": 4096}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def changed(model, seed, scale=0.02):
    """The model with other weights, as after an update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


async def play(engine, how, count=8, turns=3, seed=0, together=True):
    """Rollouts of several turns with images, some with a drop and some with a repair.

    One after the other they are equal to the last bit: what shares a batch decides that.

    Returns:
        All contexts, as a trainer gets them.
    """
    rng = np.random.default_rng(seed)
    maker, image = engine.model.view_maker, tokenizer().convert_tokens_to_ids("<|image_pad|>")
    sizes = ((32, 48), (16, 32), (48, 32), (64, 64))

    def shown(provenance, images):
        words = [tuple(int(t) for t in rng.integers(20, 300, 3)) for _ in range(images + 1)]
        ids = (*(t for w in words[:-1] for t in (*w, image)), *words[-1])
        views = [random_view(rng, maker, *sizes[rng.integers(4)]) for _ in range(images)]
        return Span(provenance, ids, views=tuple(views))

    prompts = [shown(Provenance.PROMPT, 1 + number % 2) for number in range(count)]
    texts = [shown(Provenance.PROMPT, 0) for _ in range(count)]
    seen = [
        [shown(Provenance.OBSERVED, turn % 2 + 1) for turn in range(turns)] for _ in range(count)
    ]

    async def one(number):
        contexts = [Context([prompts[number]])]
        for turn in range(turns):
            now = contexts[-1]
            result = await engine.generate(str(number), now, how, seed=100 * number + turn)
            now.spans.append(Span(Provenance.SAMPLED, result.token_ids, logprobs=result.logprobs))
            if number % 4 == 1 and turn == 0:
                now.spans[-1:] = _repaired(now.spans[-1])
            if number % 4 == 2 and turn == 0:
                carried = [dataclasses.replace(s, carried=True) for s in now.spans[1:]]
                contexts.append(Context([texts[number], *carried]))
            if turn + 1 < turns:
                contexts[-1].spans.append(seen[number][turn])
        return contexts

    rollouts = [one(number) for number in range(count)]
    played = await asyncio.gather(*rollouts) if together else [await r for r in rollouts]
    return [context for contexts in played for context in contexts]


def _repaired(span):
    """Its first tokens stay; the environment writes others in place of the rest."""
    kept = max(1, len(span.token_ids) // 2)
    injected = tuple(
        tokenizer()("<tool_call>{}</tool_call>", add_special_tokens=False)["input_ids"]
    )
    return [
        Span(Provenance.SAMPLED, span.token_ids[:kept], logprobs=span.logprobs[:kept]),
        Span(Provenance.INJECTED, injected),
    ]


def sampled(contexts):
    """The sampler's log-probs, of the trained tokens that it sampled."""
    return [
        value
        for context in contexts
        for span in context.spans
        if span.provenance is Provenance.SAMPLED and span.trained
        for value in span.logprobs
    ]


def only_sampled(contexts, logprobs):
    """Of log-probs of all trained tokens those that were sampled."""
    mask = [
        span.provenance is Provenance.SAMPLED
        for context in contexts
        for span in context.spans
        if span.trained
        for _ in span.token_ids
    ]
    return logprobs[torch.tensor(mask)]


def agree(model, contexts, how, tolerance=1e-4):
    """Whether trainer and engine agree on the sampled tokens, of which there must be some."""
    with model.inference():
        found = only_sampled(contexts, score(model, contexts, how).logprobs_T)
    expected = sampled(contexts)
    assert len(expected) > 50
    torch.testing.assert_close(found, torch.tensor(expected), atol=tolerance, rtol=0)


def prompt_of(model, seed=0):
    return Context(random_context(np.random.default_rng(seed), model.view_maker, 1).spans[:1])


def write_hybrid_checkpoint(folder):
    """A Qwen3.5, whose linear-attention layers vLLM runs on a CPU in bfloat16 only."""
    tok = tokenizer()
    ids = tok.get_vocab()
    config = Qwen3_5Config(
        text_config={
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "initializer_range": 0.05,
            "pad_token_id": tok.pad_token_id,
            "eos_token_id": tok.eos_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    tok.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR_CONFIG))
    return folder


def descendants(pid):
    """All processes below one."""
    children = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:
            continue
        children.setdefault(int(fields["PPid"]), []).append(int(fields["Pid"]))
    found, queue = set(), [pid]
    while queue:
        queue += (new := children.get(queue.pop(), []))
        found |= set(new)
    return found


def command(pid):
    """What a process was started with, or the name that it has given itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
