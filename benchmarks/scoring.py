"""Scoring with shared prefixes against the plain one-row-a-rollout forward, time and memory.

A group of G rollouts shares P prompt tokens (an image among them) and has C sampled tokens each.
The plain form runs G(P + C) tokens, the shared one P + GC: their ratio is the ideal. Forward and
backward are timed in turn, plain and shared, in a process of their own for each cell, which also
gives each form's peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import common
import numpy as np
import torch

sys.path.insert(0, str(common.ROOT / "src"))

PREFIXES, SUFFIXES, GROUPS = (256, 1024, 4096), (32, 128, 512), (4, 8, 16)
MAX_TOKENS = 20_000
FAMILIES = ("qwen3_5", "qwen3_vl", "qwen2_5_vl")
VOCABULARY = 2048
IMAGE = 2000
REPEATS = 3


def build(family: str, checkpointing: bool) -> Any:
    """A random model of hidden size 256."""
    import transformers as tf

    from reframe_vl.policy.model import VisionLanguageModel
    from reframe_vl.policy.views import ViewMaker

    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "patch_size": 16}
    vision |= {"intermediate_size": 128, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"out_hidden_size": 256}
    ids = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1}
    ids |= {"vision_start_token_id": IMAGE + 2, "vision_end_token_id": IMAGE + 3}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    if family == "qwen3_5":
        text |= {"head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        text |= {"full_attention_interval": 4}
        vision |= {"num_position_embeddings": 64}
        config = tf.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
        model = tf.Qwen3_5ForConditionalGeneration(config)
    elif family == "qwen3_vl":
        text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        model = tf.Qwen3VLForConditionalGeneration(config)
    else:
        text |= {"rope_parameters": rope}
        vision |= {"window_size": 64, "fullatt_block_indexes": [1]}
        config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model = tf.Qwen2_5_VLForConditionalGeneration(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    maker = ViewMaker(16, 2, 2, 1024, 1024 * 1024, (0.5,) * 3, (0.5,) * 3)
    return VisionLanguageModel(model, maker).train()


def contexts(model: Any, prefix: int, suffix: int, group: int) -> list[Any]:
    """A group whose prompt is half an image and half text."""
    from reframe_vl.types import Context, Provenance, Span

    rng = np.random.default_rng(0)
    side = int((prefix // 2) ** 0.5) * 32
    view = model.view_maker.view(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))

    def words(count: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, 1900, count))

    prompt = Span(
        Provenance.PROMPT, (*words(prefix - view.num_tokens - 1), IMAGE, *words(1)), views=(view,)
    )
    tails = [words(suffix) for _ in range(group)]
    return [
        Context([prompt, Span(Provenance.SAMPLED, tail, logprobs=(0.0,) * suffix)])
        for tail in tails
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Times both forms in turn, and compares what they give."""
    from reframe_vl.policy.score import score
    from reframe_vl.types import Sampling

    torch.set_num_threads(os.cpu_count() or 1)
    model = build(cell["family"], cell["checkpointing"])
    group = contexts(model, cell["P"], cell["C"], cell["G"])
    forms = (False, True) if cell["form"] == "both" else (cell["form"] == "shared",)

    def run(shared: bool) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        result = score(model, group, Sampling(), share_prefixes=shared, max_tokens=10**9)
        result.logprobs_T.mean().backward()
        seconds = time.perf_counter() - start
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return seconds, result.logprobs_T.detach(), gradients

    if cell["form"] != "both":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(forms[0])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_mb": (peak - before) / 1024}
    outcome = {shared: run(shared) for shared in forms}
    times: dict[bool, list[float]] = {False: [], True: []}
    for _, shared in itertools.product(range(cell["repeats"]), forms):
        times[shared].append(run(shared)[0])
    (_, plain, expected), (_, ours, found) = outcome[False], outcome[True]
    scale = max(float(g.abs().max()) for g in expected.values())
    return {
        "plain_s": statistics.median(times[False]),
        "shared_s": statistics.median(times[True]),
        "speed": statistics.median(p / s for p, s in zip(*times.values(), strict=True)),
        "logprob_diff": float((plain - ours).abs().max()),
        "grad_rel_diff": max(float((found[n] - g).abs().max()) for n, g in expected.items())
        / scale,
    }


def child(cell: dict[str, Any]) -> dict[str, Any]:
    """Measures a cell in a process of its own.

    Raises:
        RuntimeError: The process failed.
    """
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{cell}: {result.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def row(cell: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    timed = child(cell | {"form": "both"})
    plain, shared = (child(cell | {"form": form})["peak_mb"] for form in ("plain", "shared"))
    prefix, suffix, group = cell["P"], cell["C"], cell["G"]
    ideal = group * (prefix + suffix) / (prefix + group * suffix)
    return {
        "family": cell["family"],
        "checkpointing": cell["checkpointing"],
        "P": prefix,
        "C": suffix,
        "G": group,
        "plain s": timed["plain_s"],
        "shared s": timed["shared_s"],
        "speed-up": timed["speed"],
        "ideal": ideal,
        "of ideal": timed["speed"] / ideal,
        "plain MB": plain,
        "shared MB": shared,
        # 1 where memory falls by the ideal ratio.
        "memory of ideal": shared / plain * ideal,
        "log-prob diff": timed["logprob_diff"],
        "grad diff": timed["grad_rel_diff"],
    }


def main() -> None:
    """Runs all cells, or one given as JSON."""
    parser: argparse.ArgumentParser = common.arguments(__doc__ or "")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        # The parent reads the last line.
        sys.stdout.write(json.dumps(measure(json.loads(args.cell))) + "\n")
        return
    shapes = [
        (p, c, g)
        for p, c, g in itertools.product(PREFIXES, SUFFIXES, GROUPS)
        if g * (p + c) <= MAX_TOKENS
    ]
    if args.quick:
        shapes = [(1024, 32, 8)]
    cells = [
        {"family": f, "checkpointing": k, "P": p, "C": c, "G": g, "repeats": REPEATS}
        for f, k, (p, c, g) in itertools.product(FAMILIES, (False, True), shapes)
    ]
    if args.quick:
        cells = [cell | {"repeats": 1} for cell in cells if not cell["checkpointing"]]
    file = args.json or (None if args.quick else common.RESULTS / "scoring.json")
    rows = common.resumable(file, cells, row)
    qualifying = [r for r in rows if r["P"] >= 1024 and r["C"] <= 128]
    summary = {
        "speed_vs_ideal": min(r["of ideal"] for r in qualifying if not r["checkpointing"]),
        "speed_vs_ideal_checkpointing": min(
            (r["of ideal"] for r in qualifying if r["checkpointing"]), default=None
        ),
        "memory_vs_ideal": max(r["memory of ideal"] for r in qualifying),
        "max_logprob_diff": max(r["log-prob diff"] for r in rows),
        "max_grad_rel_diff": max(r["grad diff"] for r in rows),
    }
    content = common.report(rows, summary)
    common.show(rows, "forward + backward, float32")
    common.show([summary], "summary")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("scoring", "Scoring with shared prefixes", __doc__ or "", content)


if __name__ == "__main__":
    main()
