"""How long a step's rollouts take where no episode waits for another, and where all wait for all.

    .venv-vllm/bin/python benchmarks/rollouts.py [--quick] [--json FILE]

A real vLLM plays 64 episodes of the mini model with images. Each turn is really generated; what it
says is then written by this benchmark, so that every episode makes the same number of calls. A call
takes what was drawn for it between 10 ms and 1 s, log-uniformly. With a turn barrier the engine
gets all episodes' turns together, once the slowest tool has returned; without one each turn is a
request by itself. Idle is the share of the time in which the engine has no request.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from common import arguments, conclude, report, show

from reframe_vl.mini.model import base_folder
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.loading import Policy, load_policy
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.engine import Engine, Generation
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.rollout.settings import make_environment
from reframe_vl.rollout.vllm_engine import VLLMEngine
from reframe_vl.tools.base import Tool, ToolRequest, ToolResult
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.types import Context, Media, Sampling

FASTEST_S, SLOWEST_S = 0.01, 1.0
NUM_CALLS = 6
TURN_TOKENS = 4


@dataclass
class Scripted:
    """Generates every turn, and then says a call or at last an answer in its place.

    Attributes:
        busy_s: Time in which the engine had at least one request.
    """

    engine: Engine
    policy: Policy
    turns: dict[str, int] = field(default_factory=dict)
    busy_s: float = 0.0
    _under_way: int = 0
    _since: float = 0.0

    def open(self, sessions: Sequence[str]) -> None:
        self.turns |= dict.fromkeys(sessions, 0)

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1
        try:
            # All turns are as long, whatever the small model would have said.
            await self.engine.generate(session, context, replace(sampling, stop_ids=()), seed)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.busy_s += time.perf_counter() - self._since
        text = self._text(session)
        ids = tuple(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Generation(ids, (None,) * len(ids), "stop")

    def release(self, session: str) -> None:
        self.turns.pop(session, None)

    def close(self) -> None:
        """The engine outlives this."""

    def _text(self, session: str) -> str:
        turn = self.turns[session]
        self.turns[session] += 1
        codec = self.policy.codec
        if turn == NUM_CALLS:
            return codec.render_answer("A")
        # No call is repeated, or it would be answered without the tool.
        left, top = 60 * turn, 10 * (int(session.partition("/")[0]) % 8)
        box = [left, top, left + 400, top + 400]
        return codec.render_call("CropImage", {"bbox_2d": box})


@dataclass
class Barrier:
    """Holds turns back until every episode that is still played has asked for one."""

    engine: Scripted
    _open: set[str] = field(default_factory=set)
    _asking: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    def open(self, sessions: Sequence[str]) -> None:
        self._open |= set(sessions)
        self.engine.open(sessions)

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        self._asking[session] = asyncio.get_running_loop().create_future()
        mine = self._asking[session]
        self._go_if_complete()
        await mine
        return await self.engine.generate(session, context, sampling, seed)

    def release(self, session: str) -> None:
        self._open.discard(session)
        self.engine.release(session)
        self._go_if_complete()

    def close(self) -> None:
        """The engine outlives this."""

    def _go_if_complete(self) -> None:
        if self._open and len(self._asking) == len(self._open):
            for future in self._asking.values():
                future.set_result(None)
            self._asking = {}


def slow_tool(tool: Tool, request: ToolRequest, media: Media) -> ToolResult:
    """Runs the tool after a wait that depends on the call alone."""
    digest = hashlib.sha256(f"{media.key}{request.identity}".encode()).digest()
    draw = int.from_bytes(digest[:8], "big") / 2**64
    time.sleep(FASTEST_S * (SLOWEST_S / FASTEST_S) ** draw)
    return tool.run(request, media, 1024)


def play(
    engine: VLLMEngine, policy: Policy, loop: EventLoopThread, barrier: bool
) -> dict[str, float]:
    """Plays 64 episodes once."""
    scripted = Scripted(engine, policy)
    limits = Budget(NUM_CALLS + 1, 1024, 512, tool_view_pixels=1024)
    environment = replace(
        make_environment(policy, [CropImage()], limits),
        run_tool=slow_tool,
        tools_in_threads=True,
    )
    collector = Collector(
        Barrier(scripted) if barrier else scripted,
        environment,
        PromptSettings(show_tools=False, view_pixels=1024),
        loop,
    )
    world = MiniWorld()
    samples = [world.sample("train", index) for index in range(8)]
    how = policy.sampling(1.0, TURN_TOKENS)
    started = time.perf_counter()
    groups = collector.collect(samples, Plan(0, 8, how))
    wall = time.perf_counter() - started
    collector.ahead.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = sum(rollout.num_turns for rollout in rollouts)
    expected = len(rollouts) * (NUM_CALLS + 1)
    if turns != expected:
        raise RuntimeError(f"{turns} turns were played where {expected} were meant to be.")
    return {"wall_s": wall, "idle_share": 1 - scripted.busy_s / wall}


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    policy = load_policy(base_folder(2), family="qwen3_vl", compact_calls=True)
    settings = {
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 128 << 20,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    engine, loop = VLLMEngine(policy.model, arguments=settings), EventLoopThread()
    rows = []
    try:
        loop.run(engine.start(torch.device("cpu")))
        loop.run(engine.sync(policy.model, 0))
        play(engine, policy, loop, barrier=False)
        for repeat in range(1 if args.quick else 5):
            for barrier in (True, False):
                measured = play(engine, policy, loop, barrier)
                rows.append({"repeat": repeat, "turn_barrier": barrier, **measured})
    finally:
        engine.close()
        loop.stop()
    wall = {
        b: statistics.median(r["wall_s"] for r in rows if r["turn_barrier"] is b)
        for b in (True, False)
    }
    idle = {
        b: float(np.median([r["idle_share"] for r in rows if r["turn_barrier"] is b]))
        for b in (True, False)
    }
    summary = {
        "no_barrier_ratio": wall[False] / wall[True],
        "engine_idle_share": idle[False],
        "engine_idle_share_with_barrier": idle[True],
    }
    content = report(rows, summary)
    show(rows, "64 rollouts of 7 turns, tools of 10 ms to 1 s")
    show([summary], "Medians")
    conclude(args, "Rollouts with and without a turn barrier", __doc__ or "", content)


if __name__ == "__main__":
    main()
