"""The cold start of PyVision on the mini worlds: scripted rollouts of code, kept as runs keep them.

    python benchmarks/python_lessons.py KIND OUT COUNT

A script writes what a policy would write, and the episode does the rest: code runs, and its images
come back. The rollouts go to ``OUT/rollouts``, from which ``experiment=sft`` learns. Most scripts
call the tool once or twice, and they aim badly, as the shipped bases do: that is left to learn.
KIND is ``image``, ``video`` (on demand) or ``video_full`` (all frames in view, no code).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from mini_python import MiniPython

from reframe_vl.mini.lessons import draw_request
from reframe_vl.mini.video_world import MiniVideo, MiniVideoWorld
from reframe_vl.mini.world import CANVAS_PX, MiniWorld
from reframe_vl.rollout.collector import Collector, EventLoopThread, Plan
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.settings import make_environment
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.tools.codec import Codec
from reframe_vl.types import Context, Markup, Modality, Provenance, Sample, Sampling, Termination

KINDS = ("image", "video", "video_full")
CONTEXT = (
    "limits.max_turns=5",
    "limits.max_context_tokens=1024",
    "limits.max_visual_tokens=256",
)
"""Room for four calls: the scripts' and the experiment's."""
FULL_CONTEXT = ("rollout.settings.prompt.on_demand_video=false", "limits.frame_pixels=1024")
"""All frames in view, in as much detail as code can show them."""
_CHUNK = 4
_AT_ONCE = 128
_EXACT, _NEAR = 0.1, 0.3
_SPLIT = "cold"


class Scribe:
    """An engine that writes a script of turns for each sample."""

    def __init__(self, scripts: Mapping[str, Sequence[str]], encoder: Encoder) -> None:
        self._scripts, self._encoder = scripts, encoder
        self._turns: dict[str, int] = {}

    def open(self, sessions: Sequence[str]) -> None:
        """Begins sessions."""
        self._turns |= dict.fromkeys(sessions, 0)

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """The next line of the script."""
        line = self._scripts[session.partition("/")[2]][self._turns[session]]
        self._turns[session] += 1
        ids = self._encoder.span([Markup(line)], Provenance.EXTERNAL).token_ids
        return Generation(ids, (None,) * len(ids), "stop")

    def release(self, session: str) -> None:
        """Ends a session."""
        self._turns.pop(session, None)

    def close(self) -> None:
        """Does nothing."""


def script(sample: Sample, kind: str, codec: Codec, rng: np.random.Generator) -> list[str]:
    """The turns of a rollout that ends in the right answer."""
    codes: list[str] = []
    if kind == "image":
        for _ in range(int(rng.choice(3, p=(0.3, 0.45, 0.25)))):
            (box,) = draw_request(sample, _EXACT, _NEAR, rng).boxes
            numbers = ",".join(str(round(value * 1000 / CANVAS_PX)) for value in box)
            codes.append(f"image_0.crop([v*.128 for v in({numbers})])")
    elif kind == "video":
        codes = [f"show(video[{start}:{start + _CHUNK}])" for start in _search(sample, rng)]
    calls = [codec.render_call("python", {"code": code}) for code in codes]
    return [*calls, codec.render_answer(sample.answer.value)]


def _search(sample: Sample, rng: np.random.Generator) -> list[int]:
    """Where to look: on until the evidence was seen, or given up early."""
    assert isinstance(sample.media, MiniVideo) and sample.evidence is not None
    starts = list(range(0, sample.media.num_frames, _CHUNK))
    if rng.random() < 0.3:
        return []
    looked: list[int] = []
    for start in starts:
        looked.append(start)
        found = sample.evidence.frames & set(range(start, start + _CHUNK))
        if found or rng.random() < 0.3:
            break
    return looked


def main() -> None:
    """Writes the lessons of a kind."""
    kind, out, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if kind not in KINDS:
        raise SystemExit(f"There is no kind {kind}: {', '.join(KINDS)}.")
    register_resolvers()
    overrides = ["rollout=python", "numbers=pyvision_mini", "base=0", *CONTEXT]
    overrides += FULL_CONTEXT if kind == "video_full" else ()
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base="1.3"):
        cfg = compose("train", overrides)
    policy, settings = instantiate(cfg.model), instantiate(cfg.rollout.settings)
    world = MiniWorld() if kind == "image" else MiniVideoWorld()
    tools = [MiniPython(modality) for modality in Modality]
    environment = make_environment(policy, tools, settings.budget)
    store, loop = RolloutStore(out / "rollouts"), EventLoopThread()
    rng = np.random.default_rng(KINDS.index(kind))
    for step in range(count // _AT_ONCE):
        samples = [world.sample(_SPLIT, step * _AT_ONCE + i) for i in range(_AT_ONCE)]
        scripts = {s.id: script(s, kind, policy.codec, rng) for s in samples}
        engine = Scribe(scripts, environment.encoder)
        collector = Collector(engine, environment, settings.prompt, loop)
        plan = Plan(step, 1, settings.sampling(policy), author="script")
        groups = collector.collect(samples, plan)
        for rollout in (r for group in groups for r in group.rollouts):
            if rollout.termination is not Termination.ANSWERED:
                raise SystemExit(f"A script did not end in an answer: {rollout.termination}.")
            rollout.reward = 1.0
        store.write(step, groups, environment.encoder.decode)
    loop.stop()


if __name__ == "__main__":
    main()
