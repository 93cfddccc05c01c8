"""Where a training step's time goes: in the model, or around it.

Whole runs of `experiment=gdgrpo_spatial` by the entry point's own function, with everything that
they do by default but evaluation: drawing or reading media, prompts, tools, rewards, advantages,
batches, rollouts written to disk, TensorBoard, checkpoints. Times are exclusive (a part that runs
inside another is taken out of it) and medians over steps, the first ones left out.

- generation: the engine's waves, prompts and decoding, with what it expands for them.
- forward: `policy.score`, without what is cut and packed for it on the CPU.
- backward, optimiser: Lightning's own; the optimiser with clipping.
- overhead: all the rest, by part. "overhead_share" is the largest over the settings. What runs
  beside the model in threads (the next step's prompts, rollouts to disk) counts where it is waited
  for.

Settings: the embedded default as `make train` has it, and a random Qwen3-VL of hidden size 256 on
the same world at larger views (about 1,000 prompt tokens, 64 tokens a turn), which makes no calls:
its overhead has no tools in it.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch

sys.path.insert(0, str(common.ROOT / "src"))

MODEL_PARTS = ("generation", "forward", "backward", "optimiser")
SKIPPED = 2
BESIDE = ("prompts-ahead", "rollout-writer")
"""Threads that work beside the model: their time is not the step's, though it slows the rest."""
LARGER = {
    "limits.view_pixels": 524288,
    "limits.tool_view_pixels": 65536,
    "limits.max_new_tokens": 64,
    "limits.max_context_tokens": 8192,
    "limits.max_visual_tokens": 8192,
    "prompts_per_step": 4,
    "trainer.accumulate_grad_batches": 4,
}


class Clock:
    """Exclusive seconds by part; parts may run in any thread, but only one at a time does."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack = ["other"]
        self._since = time.perf_counter()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    @property
    def within(self) -> str:
        """The part that is under way."""
        return self._stack[-1]

    def begin(self, part: str) -> None:
        """Enters a part."""
        self._turn()
        self._stack.append(part)

    def end(self) -> None:
        """Leaves the latest part."""
        self._turn()
        self._stack.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self._turn()
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)


def wrap(clock: Clock, owner: Any, name: str, part: str | None) -> None:
    """Counts a function's time as a part's; None is for what engine and scoring both call."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.startswith(BESIDE):
            return function(*args, **kwargs)
        with clock.part(part or ("packing" if clock.within == "forward" else "generation")):
            return function(*args, **kwargs)

    setattr(owner, name, timed)


def instrument(clock: Clock, steps: list[dict[str, float]]) -> None:
    """Puts the clock around the parts of a step."""
    from reframe_vl.algorithms import gdgrpo
    from reframe_vl.algorithms.module import PolicyModule
    from reframe_vl.callbacks import checkpoint, evidence_reward, rollout_log
    from reframe_vl.mini import world
    from reframe_vl.policy import score
    from reframe_vl.policy.model import VisionLanguageModel
    from reframe_vl.policy.views import ViewMaker
    from reframe_vl.rollout import collector, episode
    from reframe_vl.rollout.hf_engine import HFEngine

    for owner, name, part in (
        (HFEngine, "_generate", "generation"),
        (gdgrpo, "score", "forward"),
        (score, "plant", "packing"),
        (VisionLanguageModel, "expand", None),
        (ViewMaker, "patches", "images"),
        (ViewMaker, "view", "images"),
        (world.MiniImage, "look", "media"),
        (collector, "build_prompt", "prompts"),
        # What awaits cannot be timed from outside; this is the part of a turn that takes time.
        (episode.Episode, "_observe", "observations"),
        (evidence_reward, "score", "rewards"),
        (gdgrpo.GDGRPO, "prepare", "batches"),
        (rollout_log.RolloutLog, "on_train_epoch_end", "rollouts to disk"),
        (checkpoint.RunCheckpoint, "on_train_epoch_end", "checkpoints"),
    ):
        wrap(clock, owner, name, part)

    def before_backward(self: Any, loss: Any) -> None:
        clock.begin("backward")

    def after_backward(self: Any) -> None:
        clock.end()

    def before_optimizer_step(self: Any, optimizer: Any) -> None:
        clock.begin("optimiser")
        self.optimising = True

    def batch_end(self: Any, *args: Any) -> None:
        if getattr(self, "optimising", False):
            clock.end()
            self.optimising = False

    def epoch_start(self: Any) -> None:
        steps.append(clock.take())

    hooks: dict[str, Any] = {
        "on_before_backward": before_backward,
        "on_after_backward": after_backward,
        "on_before_optimizer_step": before_optimizer_step,
        "on_train_batch_end": batch_end,
        "on_train_epoch_start": epoch_start,
    }
    for name, hook in hooks.items():
        setattr(PolicyModule, name, hook)


def run(name: str, overrides: list[str], clock: Clock, steps: list[dict[str, float]]) -> list[Any]:
    """Trains, and gives the rows of a setting."""
    from hydra import compose, initialize_config_dir

    from reframe_vl.training import train

    steps.clear()
    with tempfile.TemporaryDirectory() as folder:
        with initialize_config_dir(str(common.ROOT / "configs"), version_base="1.3"):
            cfg = compose("train", ["evaluate=false", *overrides, f"paths.run_dir={folder}/run"])
        train(cfg)
    # The first entry is what went before the first step, the last step's end is not seen.
    kept = steps[1 + SKIPPED :]
    walls = [sum(step.values()) for step in kept]
    rows = []
    for part in sorted({part for step in kept for part in step}, key=_rank):
        shares = [step.get(part, 0.0) / wall for step, wall in zip(kept, walls, strict=True)]
        rows.append(
            {
                "setting": name,
                "part": part,
                "ms": 1e3 * statistics.median(step.get(part, 0.0) for step in kept),
                "share": statistics.median(shares),
            }
        )
    around = [
        1 - sum(step.get(part, 0.0) for part in MODEL_PARTS) / wall
        for step, wall in zip(kept, walls, strict=True)
    ]
    rows.append(
        {
            "setting": name,
            "part": "overhead",
            "ms": 1e3 * statistics.median(a * w for a, w in zip(around, walls, strict=True)),
            "share": statistics.median(around),
        }
    )
    rows.append(
        {"setting": name, "part": "step", "ms": 1e3 * statistics.median(walls), "share": 1.0}
    )
    return rows


def _rank(part: str) -> tuple[int, str]:
    return (MODEL_PARTS.index(part), "") if part in MODEL_PARTS else (len(MODEL_PARTS), part)


def main() -> None:
    """Measures both settings."""
    args = common.arguments(__doc__ or "").parse_args()
    from vs_trl import write_model

    from reframe_vl.runs import register_resolvers

    register_resolvers()
    clock = Clock()
    steps: list[dict[str, float]] = []
    instrument(clock, steps)
    count = (8, 5) if args.quick else (43, 13)
    common_overrides = ["callbacks.evaluation.every=0"]
    rows = run("embedded default", [*common_overrides, f"steps={count[0]}"], clock, steps)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        larger = [f"{name}={value}" for name, value in LARGER.items()]
        larger += [f"model.path={folder}", f"steps={count[1]}"]
        rows += run("hidden size 256", [*common_overrides, *larger], clock, steps)
    shares = [row["share"] for row in rows if row["part"] == "overhead"]
    summary = {
        "overhead_share": max(shares),
        "overhead_share_embedded": shares[0],
        "overhead_share_hidden_256": shares[1],
    }
    content = common.report(rows, summary)
    common.show(rows, f"one step, {torch.get_num_threads()} thread(s)")
    common.show([summary], "summary")
    file = args.json or (None if args.quick else common.RESULTS / "step_breakdown.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("step_breakdown", "Where a step's time goes", __doc__ or "", content)


if __name__ == "__main__":
    main()
