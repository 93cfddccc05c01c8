"""Training steps beside those of TRL's GRPOTrainer and of the package prefix-grouper.

Every side is a process of its own that takes whole GRPO steps by its own loop: ours Lightning's
`fit` with the rollout callback, the collector, the transformers engine and the GRPO module, TRL's
`GRPOTrainer.train()`. A step has one prompt of P tokens, half of them an image, and G rollouts of
exactly C tokens. The sides take their steps in turn (ours, TRL's, prefix-grouper's, ours, …); times
are medians, and ratios medians over steps that ran one after the other. The first step of a size is
not timed (but with --quick). Memory is what the steps add to the peak of a process that has taken a
tiny step before.

- `optimise_s`: scoring of the step's rollouts, loss, backward, clipping and the optimiser's step.
- `generate_s`: all before it: rollouts, rewards, advantages, the batch.
- `step_s`: both.

**Alike on both sides**: random weights (a Qwen3-VL of hidden size 256), images, chat layout and
prompt ids; float32; one thread; torch's fused attention; temperature 1; rollouts of one length (the
end of a turn is banned); reward; one group, one micro-batch and one update a step; the clipped
surrogate (0.2) weighted by token (TRL's `dapo`), no KL, no reference, no gradient checkpointing;
entropies are computed; gradients are clipped at 1; AdamW with a learning rate of 1e-6; loggers are
off. Neither recomputes old log-probs or corrects for the sampler. On given rollouts the gradients
of all sides are compared before clipping: "grad diff" is the largest difference over the
largest entry.

**Different**:

- Prompts: TRL feeds the prompt and its image G times, to generation and to scoring, and has no
  setting that would spare it that. Here both run once.
- Generation: both keep keys and values. TRL's is `generate` of transformers; its continuous
  batching refuses models with images. vLLM, which both can use, is not compared.
- Images: TRL's processor runs twice a step, and both runs count as generation. Here an image is cut
  into patches once for generation and once for scoring. TRL's data loader decodes images before the
  clock starts; here a step's prompt is made in a second thread beside the backward pass before it.
- Logits: without Triton, TRL computes those of all tokens. It is given the form of GPUs here: those
  of rollout tokens only. Its backward pass computes them again; here they are kept up to 4,096
  tokens. The vocabulary has 2,048 entries, so either costs little.
- Banned tokens: ours are scored under the distribution they were drawn from, TRL's under the whole
  vocabulary. For the comparison of gradients nothing is banned.
- Advantages are divided by the standard deviation of the population here and of the sample in TRL;
  for the comparison of gradients they are given.
- The optimiser is torch's AdamW in its default form here, its fused form in TRL (TRL's default).

**prefix-grouper** (0.0.1.post1) has an attention function that runs a group's prompt once, and
neither a trainer nor generation: it is compared in `optimise_s` and memory. What its documentation
asks the user to write is `peers/prefix_grouper_step.py`, in the leanest form: no trainer around it,
no banned tokens, images cut before the clock starts, the tower run once a group, fused AdamW. Its
own attention needs FlashAttention 2, which no CPU has; torch's takes its place. Full attention is
all that it forks: it does not apply to Qwen3.5, whose Gated-DeltaNet layers carry a state.

The peers run in `.venv-trl/`, which `make trl-env` makes, and this script where it is missing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from side_by_side import ONE_THREAD

sys.path.insert(0, str(common.ROOT / "src"))
sys.path.insert(0, str(common.ROOT / "benchmarks" / "peers"))

from exchange import MODEL, Work, reward

PEER_PYTHON = common.ROOT / ".venv-trl" / "bin" / "python"
SHAPES = ((1024, 64, 8), (2048, 64, 8))
WARM_SHAPE = (64, 8, 2)
REPEATS = 3
CLOSING_S = 10
MEASURES = {
    "trl": ("generate_s", "optimise_s", "step_s", "peak_mb"),
    "prefix_grouper": ("optimise_s", "peak_mb"),
}


def write_model(folder: Path, hidden: int = 256) -> list[int]:
    """Random weights in a folder that both sides load.

    Returns:
        The ids that may not be sampled: special tokens and those that stand for nothing.
    """
    from scoring import build

    from reframe_vl.mini.model import PROCESSOR_CONFIG, save_checkpoint
    from reframe_vl.mini.tokenizer import SPECIAL_TOKENS, build_tokenizer

    tokenizer = build_tokenizer()
    wrapped = build("qwen3_vl", checkpointing=False, hidden=hidden)
    model, maker = wrapped.base, wrapped.view_maker
    ids = tokenizer.get_vocab()
    model.config.image_token_id = ids["<|image_pad|>"]
    model.config.video_token_id = ids["<|video_pad|>"]
    model.config.vision_start_token_id = ids["<|vision_start|>"]
    model.config.vision_end_token_id = ids["<|vision_end|>"]
    save_checkpoint(model, tokenizer, folder)
    geometry = {
        "patch_size": maker.patch_size,
        "merge_size": maker.merge_size,
        "temporal_patch_size": maker.temporal_patch_size,
        "size": {"shortest_edge": maker.min_pixels, "longest_edge": maker.max_pixels},
    }
    processor = {
        name: part | geometry if isinstance(part, dict) else part
        for name, part in PROCESSOR_CONFIG.items()
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    padded = range(len(tokenizer), model.config.text_config.vocab_size)
    return sorted({*(ids[token] for token in SPECIAL_TOKENS), *padded})


def make_work(
    shape: tuple[int, int, int], count: int, banned_ids: Sequence[int], given: bool = False
) -> Work:
    """Prompts of exactly P tokens, half of them an image.

    Args:
        shape: P, C and G.
        count: How many prompts.
        banned_ids: Not to be sampled.
        given: Also make the only prompt's rollouts, with their rewards and advantages.
    """
    from reframe_vl.algorithms.advantages import group_advantages
    from reframe_vl.mini.glyphs import COLOR_NAMES
    from reframe_vl.mini.tokenizer import build_tokenizer

    prefix, suffix, group = shape
    rng = np.random.default_rng(prefix)
    side = int((prefix // 2) ** 0.5)
    message = {"role": "user", "content": [{"type": "image"}]}
    # Typed for text alone.
    tokenizer: Any = build_tokenizer()
    bare = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    # The image's one placeholder becomes side**2; each word is a token.
    words = prefix - side**2 - (len(bare["input_ids"]) - 1)
    allowed = np.setdiff1d(np.arange(max(banned_ids)), banned_ids)
    completions = rng.choice(allowed, (group if given else 0, suffix))
    rewards = torch.tensor([reward(row) for row in completions], dtype=torch.float32)
    advantages = group_advantages(rewards, torch.ones(len(rewards), dtype=torch.bool))
    return Work(
        images=rng.integers(0, 256, (count, side * 32, side * 32, 3), dtype=np.uint8),
        questions=np.array(
            ["".join(f" {w}" for w in rng.choice(COLOR_NAMES, words)) for _ in range(count)]
        ),
        num_rollouts=group,
        num_tokens=suffix,
        # TRL scores under the whole vocabulary: given rollouts are to be scored alike.
        banned_ids=np.array([] if given else banned_ids, dtype=np.int64),
        completions=completions,
        rewards=rewards.double().numpy(),
        advantages=advantages.double().numpy(),
    )


class Side:
    """A process that takes steps when it is told to.

    Args:
        name: Of the side; its script is in peers/.
        folder: Where the sides exchange files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        python = sys.executable if name == "reframe" else str(PEER_PYTHON)
        script = common.ROOT / "benchmarks" / "peers" / f"{name}_step.py"
        self.name = name
        self.log = folder / f"{name}.log"
        self.gradients = folder / f"{name}-gradients.npz"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(script), str(folder), name],
                env=os.environ | ONE_THREAD | {"PYTHONPATH": str(common.ROOT / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def answer(self) -> dict[str, Any]:
        """What the process tells next.

        Raises:
            RuntimeError: It ended instead.
        """
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.name} has ended:\n{tail}")
        told: dict[str, Any] = json.loads(line)
        return told

    def step(self) -> dict[str, Any]:
        """Lets it take the next step, and waits for it."""
        if self._process.stdin:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Ends the process; one that waits for its turn ends by itself."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one shape."""
    shape = (cell["P"], cell["C"], cell["G"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        banned = write_model(folder / MODEL)
        make_work(WARM_SHAPE, 1, banned).save(folder / "warm.npz")
        make_work(shape, cell["untimed"] + cell["repeats"], banned).save(folder / "timed.npz")
        make_work(shape, 1, banned, given=True).save(folder / "given.npz")
        sides = []
        for name in ("reframe", *MEASURES):
            sides.append(Side(name, folder))
            stack.callback(sides[-1].close)
        for side in sides:
            side.answer()
        for side in sides * cell["untimed"]:
            side.step()
        steps: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
        for _ in range(cell["repeats"]):
            for side in sides:
                steps[side.name].append(side.step())
        told = {side.name: side.step() for side in sides}
        if any(t["prompt_ids"] != told["reframe"]["prompt_ids"] for t in told.values()):
            raise RuntimeError("The sides have made different token ids of the same prompt.")
        if len(told["reframe"]["prompt_ids"]) != cell["P"]:
            raise RuntimeError(f"The prompt has {len(told['reframe']['prompt_ids'])} tokens.")
        differences = {s.name: _difference(sides[0].gradients, s.gradients) for s in sides[1:]}
    return [
        {
            **{name: cell[name] for name in ("P", "C", "G")},
            "peer": peer,
            "measure": measure,
            **_compared(
                [step[measure] for step in steps["reframe"]],
                [step[measure] for step in steps[peer]],
                last=measure == "peak_mb",
            ),
            "grad diff": differences[peer],
        }
        for peer, measures in MEASURES.items()
        for measure in measures
    ]


def _compared(ours: list[float], theirs: list[float], last: bool) -> dict[str, float]:
    """Medians, and the median ratio of steps that ran one after the other; or the last values."""
    if last:
        ours, theirs = ours[-1:], theirs[-1:]
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
    }


def _difference(ours: Path, theirs: Path) -> float:
    """The largest difference of two gradients, relative to the largest entry.

    Raises:
        RuntimeError: They are of different parameters.
    """
    with np.load(ours) as a, np.load(theirs) as b:
        if set(a.files) != set(b.files):
            raise RuntimeError(f"Gradients of other parameters: {set(a.files) ^ set(b.files)}.")
        scale = max(float(np.abs(b[name]).max()) for name in b.files)
        return max(float(np.abs(a[name] - b[name]).max()) for name in b.files) / scale


def main() -> None:
    args = common.arguments(__doc__ or "").parse_args()
    subprocess.run(
        ["make", "--silent", "trl-env", f"PYTHON={sys.executable}"], cwd=common.ROOT, check=True
    )
    shapes = SHAPES[:1] if args.quick else SHAPES
    cells = [
        {"P": p, "C": c, "G": g, "untimed": not args.quick, "repeats": 1 if args.quick else REPEATS}
        for p, c, g in shapes
    ]
    file = args.json or (None if args.quick else common.RESULTS / "vs_trl.json")
    rows = [row for part in common.resumable(file, cells, measure) for row in part]

    def least(peer: str, name: str) -> float:
        return min(r["ratio"] for r in rows if r["peer"] == peer and r["measure"] == name)

    summary = {
        "optimisation_ratio": least("trl", "optimise_s"),
        "step_ratio": least("trl", "step_s"),
        "memory_ratio": least("trl", "peak_mb"),
        "generation_ratio": least("trl", "generate_s"),
        "prefix_grouper_optimisation_ratio": least("prefix_grouper", "optimise_s"),
        "prefix_grouper_memory_ratio": least("prefix_grouper", "peak_mb"),
        "max_grad_rel_diff": max(r["grad diff"] for r in rows),
    }
    content = common.report(rows, summary)
    common.show(rows, "a training step")
    common.show([summary], "summary")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("vs_trl", "Training steps beside TRL's", __doc__ or "", content)


if __name__ == "__main__":
    main()
