"""How much of vLLM's own throughput an evaluation on benchmarks gets.

    .venv-vllm/bin/python benchmarks/eval_throughput.py [--quick] [--json FILE]

A model answers questions about images in PNG files, as `src/eval.py benchmark=… rollout=vllm` plays
them: files are read, prompts built, turns sampled, calls parsed and executed, answers written. Then
vLLM's own `AsyncLLM` gets the very same prompts, all at once and with the images in memory: those
of later turns too, which an evaluation can only ask for once the turn before and its call are done.
Both begin with empty caches, and sample as many tokens. The ratio is that of the throughputs.

What an evaluation adds to a prompt is about 1 ms of work on the CPU. `embedded` is the worst case:
a model of 0.3 million weights that answers within milliseconds, in a turn of 4 tokens (`no_tools`)
or with a call before it (`tools`). `larger` has 8 million random weights and says 16 tokens. vLLM
runs on the CPU too and shares its cores with what surrounds it. Where other programs run beside
this one, single ratios scatter by about a fifth.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import arguments, conclude, report, show
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from reframe_vl.data.media import ImageFile
from reframe_vl.evaluation.answers import AnswerFile
from reframe_vl.evaluation.benchmark_play import Condition, Player
from reframe_vl.evaluation.benchmarks.base import Item
from reframe_vl.evaluation.outcomes import Arm
from reframe_vl.mini.model import base_folder, model_config, save_checkpoint
from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.mini.world import MiniImage, MiniWorld
from reframe_vl.policy.loading import load_policy
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import RolloutSettings
from reframe_vl.rollout.vllm_engine import VLLMEngine
from reframe_vl.rollout.vllm_request import Reply, Request
from reframe_vl.tools.crop_image import CropImage

ARGUMENTS = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 128 << 20,
    "enforce_eager": True,
    "disable_log_stats": True,
}
MEASURED = ("prompts", "tokens", "evaluation_s", "alone_s", "ratio")


@dataclass
class Recorder:
    """Keeps what an engine's backend is asked, and counts what it answers."""

    backend: Any
    requests: list[Request] = field(default_factory=list)
    num_tokens: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    async def generate(self, request: Request) -> Reply:
        reply: Reply = await self.backend.generate(request)
        self.requests.append(request)
        self.num_tokens += len(reply.token_ids)
        return reply


def items_in(folder: Path, count: int) -> list[Item]:
    """Questions of the mini world about images that lie in files."""
    world, items = MiniWorld(), []
    for index in range(count):
        sample = world.sample("test", index)
        assert isinstance(sample.media, MiniImage)
        path = folder / f"{index}.png"
        Image.fromarray(sample.media.canvas.round().astype("uint8")).save(path)
        items.append(Item(replace(sample, media=ImageFile(path), evidence=None), str(index)))
    return items


async def forget(llm: Any) -> None:
    """Empties vLLM's caches."""
    await llm.reset_prefix_cache()
    await llm.reset_mm_cache()
    await llm.reset_encoder_cache()


async def alone(llm: Any, requests: Sequence[Request]) -> tuple[float, int]:
    """Seconds that vLLM takes for these prompts by itself, and the tokens that it samples."""
    prompts = [prompt_of(request) for request in requests]

    async def one(number: int) -> int:
        kind = RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(**requests[number].parameters, output_kind=kind)
        [prompt] = await llm.renderer.render_cmpl_async([prompts[number]])
        async for output in llm.generate(prompt, parameters, f"alone/{started}/{number}"):
            last = output
        return len(last.outputs[0].token_ids)

    started = time.perf_counter()
    tokens = await asyncio.gather(*[one(number) for number in range(len(prompts))])
    return time.perf_counter() - started, sum(tokens)


def prompt_of(request: Request) -> Mapping[str, Any]:
    """A request in vLLM's own words."""
    images = [Image.fromarray(view.pixels) for view in request.views if view.pixels is not None]
    return {
        "prompt_token_ids": request.token_ids,
        "multi_modal_data": {"image": images},
        "multi_modal_uuids": {"image": [view.hash for view in request.views]},
    }


def measure(player: Player, items: Sequence[Item], arm: Arm) -> dict[str, Any]:
    """Plays the items once, and gives vLLM the same prompts."""
    engine: Any = player._engine
    loop, recorder = player._loop, Recorder(engine.backend)
    llm = engine.backend._llm
    engine.backend = recorder
    loop.run(forget(llm))
    with tempfile.TemporaryDirectory() as folder:
        file = AnswerFile(Path(folder) / "answers.jsonl")
        started = time.perf_counter()
        player.play(items, Condition(arm), file)
        ours_s = time.perf_counter() - started
        lost = [a for a in file.of(arm.value).values() if a.left_out is not None]
    engine.backend = recorder.backend
    if lost:
        raise RuntimeError(f"{len(lost)} items were not played; the first: {lost[0]}")
    loop.run(forget(llm))
    alone_s, num_tokens = loop.run(alone(llm, recorder.requests))
    return {
        "arm": arm.value,
        "prompts": len(recorder.requests),
        "tokens": recorder.num_tokens,
        "tokens_alone": num_tokens,
        "evaluation_s": ours_s,
        "alone_s": alone_s,
        "ratio": alone_s / ours_s,
    }


def larger_model(folder: Path) -> Path:
    """The folder of a model with 8 million weights, 30 times those of the embedded one."""
    tokenizer = build_tokenizer()
    config = model_config(tokenizer)
    config.text_config.update(
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    )
    config.vision_config.out_hidden_size = 384
    torch.manual_seed(0)
    save_checkpoint(Qwen3VLForConditionalGeneration(config), tokenizer, folder)
    return folder


def rows_of(name: str, path: Path, items: Sequence[Item], plan: Sequence[Arm]) -> list[Any]:
    """Plays and measures the items with one model, one arm of the plan after the other."""
    policy = load_policy(path, family="qwen3_vl", compact_calls=True)
    settings = RolloutSettings(
        PromptSettings(show_tools=False, view_pixels=1024),
        Budget(3, 512, 192, tool_view_pixels=1024),
        max_new_tokens=16,
    )
    player = Player(
        policy, settings, [CropImage()], lambda model: VLLMEngine(model, arguments=ARGUMENTS)
    )
    try:
        measure(player, items[:64], Arm.TOOLS)
        return [{"model": name, **measure(player, items, arm)} for arm in plan]
    finally:
        player.close()


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    repeats = 1 if args.quick else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = items_in(folder, 512)
        plan = [Arm.NO_TOOLS, Arm.TOOLS] * repeats
        rows = rows_of("embedded", base_folder(2), items, plan)
        larger = larger_model(folder / "larger")
        rows += rows_of("larger", larger, items[:256], [Arm.NO_TOOLS] * repeats)
    cells = dict.fromkeys((row["model"], row["arm"]) for row in rows)
    medians = []
    for model, arm in cells:
        these = [row for row in rows if (row["model"], row["arm"]) == (model, arm)]
        median = {name: statistics.median(row[name] for row in these) for name in MEASURED}
        medians.append({"model": model, "arm": arm, **median})
    summary = {f"ratio_{m['model']}_{m['arm']}": m["ratio"] for m in medians}
    content = report(rows, summary)
    show(rows, "An evaluation and vLLM alone, on the same prompts")
    show(medians, "Medians")
    conclude(args, "Throughput of an evaluation with vLLM", __doc__ or "", content)


if __name__ == "__main__":
    main()
