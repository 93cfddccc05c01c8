"""Scoring with shared prefixes against the plain one-row-a-rollout forward, time and memory.

A group of G rollouts shares P prompt tokens (an image among them) and has C sampled tokens each.
The plain form is the forward of transformers itself on a batch of G rows, as trainers commonly run
it: every row has the prompt and encodes its own copy of the image; logits are those of sampled
tokens only. It runs G(P + C) tokens, the shared form P + GC: their ratio is the ideal. Forward and
backward of both forms are timed in turn, in a process of their own for each cell, and so is the
vision tower on one image. "Decoder of ideal" takes the tower's time out of both forms: G images of
the plain one, one of the shared one; "speed_vs_ideal" does not, since the tower's G - 1 runs are
spared in use too. Above 1 the plain form suffers from its size. Peak memory is what a form adds to
a process that has scored no more than a tiny group; each form has such a process. OMP_NUM_THREADS
sets the threads. With gradient checkpointing only the cells of the summary are measured: P >= 1024
and C <= 128.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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


def build(family: str, checkpointing: bool, hidden: int = 256) -> Any:
    """A random model."""
    import transformers as tf

    from reframe_vl.policy.model import VisionLanguageModel
    from reframe_vl.policy.views import ViewMaker

    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 128,
    }
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "patch_size": 16}
    vision |= {"intermediate_size": 128, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"out_hidden_size": hidden}
    ids = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1}
    ids |= {"vision_start_token_id": IMAGE + 2, "vision_end_token_id": IMAGE + 3}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    if family == "qwen3_5":
        text |= {"head_dim": 32, "linear_num_key_heads": hidden // 64}
        text |= {"linear_num_value_heads": hidden // 32}
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


def contexts(model: Any, prefix: int, suffix: int, group: int, image: int = IMAGE) -> list[Any]:
    """A group whose prompt is half an image and half text."""
    from reframe_vl.types import Context, Provenance, Span

    rng = np.random.default_rng(0)
    side = int((prefix // 2) ** 0.5) * 32
    view = model.view_maker.view(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))

    def words(count: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, 1900, count))

    prompt = Span(
        Provenance.PROMPT, (*words(prefix - view.num_tokens - 1), image, *words(1)), views=(view,)
    )
    tails = [words(suffix) for _ in range(group)]
    return [
        Context([prompt, Span(Provenance.SAMPLED, tail, logprobs=(0.0,) * suffix)])
        for tail in tails
    ]


def plain(model: Any, group: list[Any]) -> torch.Tensor:
    """Log-probs of sampled tokens from transformers' own forward, one row a rollout."""
    sampled = torch.tensor([context.spans[-1].token_ids for context in group])
    views = [view for context in group for view in context.views]
    rows = [model.expand(context) for context in group]
    output = model.base(
        input_ids=torch.from_numpy(np.stack([row.token_ids for row in rows])),
        mm_token_type_ids=torch.from_numpy(np.stack([row.image_mask for row in rows])).int(),
        # One after the other: patches of equal views are not cut once for all.
        pixel_values=torch.from_numpy(
            np.concatenate([model.view_maker.patches([view]) for view in views])
        ),
        image_grid_thw=torch.tensor([view.grid_thw for view in views]),
        logits_to_keep=sampled.shape[1] + 1,
        use_cache=False,
    )
    table = output.logits[:, :-1].float().log_softmax(-1)
    return table.gather(-1, sampled[..., None]).flatten()


def shared(model: Any, group: list[Any]) -> torch.Tensor:
    """The same from this project's scoring."""
    from reframe_vl.policy.score import score
    from reframe_vl.types import Sampling

    return score(model, group, Sampling(), max_tokens=10**9).logprobs_T


def timed(
    model: Any, forward: Callable[[], torch.Tensor]
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Seconds of forward and backward, what came out, and gradients."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    result = forward()
    result.mean().backward()
    seconds = time.perf_counter() - start
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return seconds, result.detach(), gradients


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Takes the plain form's peak memory, or the shared form's and then times and compares both."""
    torch.set_num_threads(cell["threads"])
    model = build(cell["family"], cell["checkpointing"])
    group = contexts(model, cell["P"], cell["C"], cell["G"])
    first = plain if cell["only_plain_memory"] else shared
    # The libraries' own pages and buffers belong to neither form.
    timed(model, lambda: first(model, contexts(model, 64, 8, 2)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, found, found_gradients = timed(model, lambda: first(model, group))
    peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if cell["only_plain_memory"]:
        return {"peak_mb": peak_mb}
    _, expected, expected_gradients = timed(model, lambda: plain(model, group))
    scale = max(float(g.abs().max()) for g in expected_gradients.values())
    differences = [
        float((found_gradients[name] - g).abs().max()) for name, g in expected_gradients.items()
    ]
    image = group[0].views
    runs = {
        "plain": lambda: plain(model, group),
        "shared": lambda: shared(model, group),
        "tower": lambda: model.encode(image).embeds,
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _, (name, run) in itertools.product(range(cell["repeats"]), runs.items()):
        seconds[name].append(timed(model, run)[0])
    return {
        **{f"{name}_s": statistics.median(values) for name, values in seconds.items()},
        "speed": statistics.median(
            p / s for p, s in zip(seconds["plain"], seconds["shared"], strict=True)
        ),
        "peak_mb": peak_mb,
        "logprob_diff": float((expected - found).abs().max()),
        "grad_rel_diff": max(differences) / scale,
    }


def qualifies(prefix: int, suffix: int) -> bool:
    """Whether a cell counts in the summary."""
    return prefix >= 1024 and suffix <= 128


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
    timed, memory = (child(cell | {"only_plain_memory": only}) for only in (False, True))
    plain_mb, shared_mb = memory["peak_mb"], timed["peak_mb"]
    prefix, suffix, group = cell["P"], cell["C"], cell["G"]
    ideal = group * (prefix + suffix) / (prefix + group * suffix)
    tower = timed["tower_s"]
    decoder = (timed["plain_s"] - group * tower) / (timed["shared_s"] - tower)
    return {
        "family": cell["family"],
        "checkpointing": cell["checkpointing"],
        "P": prefix,
        "C": suffix,
        "G": group,
        "threads": cell["threads"],
        "plain s": timed["plain_s"],
        "shared s": timed["shared_s"],
        "tower s": tower,
        "speed-up": timed["speed"],
        "ideal": ideal,
        "of ideal": timed["speed"] / ideal,
        "decoder of ideal": decoder / ideal,
        "plain MB": plain_mb,
        "shared MB": shared_mb,
        # 1 where memory falls by the ideal ratio.
        "memory of ideal": shared_mb / plain_mb * ideal,
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
        {"family": f, "checkpointing": k, "P": p, "C": c, "G": g}
        | {"repeats": REPEATS, "threads": torch.get_num_threads()}
        for f, k, (p, c, g) in itertools.product(FAMILIES, (False, True), shapes)
        if not k or qualifies(p, c)
    ]
    if args.quick:
        cells = [cell | {"repeats": 1} for cell in cells if not cell["checkpointing"]]
    file = args.json or (None if args.quick else common.RESULTS / "scoring.json")
    rows = common.resumable(file, cells, row)
    qualifying = [r for r in rows if qualifies(r["P"], r["C"])]
    summary = {
        "speed_vs_ideal": min(r["of ideal"] for r in qualifying if not r["checkpointing"]),
        "speed_vs_ideal_decoder": min(
            r["decoder of ideal"] for r in qualifying if not r["checkpointing"]
        ),
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
