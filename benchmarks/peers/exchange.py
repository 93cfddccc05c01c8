"""What both sides of a comparison share: their work, their turns, and what they tell.

Each side is a process with an interpreter of its own; this module runs in all of them and needs
NumPy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODEL = "model"
"""The folder of the weights, the tokenizer and the processor, below the exchange folder."""


@dataclass(frozen=True)
class Work:
    """Prompts, one a step, and how many rollouts of how many tokens to make of each.

    Attributes:
        images: One a prompt, shape (N, side, side, 3).
        questions: One a prompt.
        completions: Given rollouts of the only prompt, shape (G, C); empty where they are sampled.
        rewards: Of given rollouts.
        advantages: Of given rollouts.
        banned_ids: Never sampled; the end of a turn is among them.
    """

    images: npt.NDArray[np.uint8]
    questions: npt.NDArray[np.str_]
    num_rollouts: int
    num_tokens: int
    banned_ids: npt.NDArray[np.int64]
    completions: npt.NDArray[np.int64]
    rewards: npt.NDArray[np.float64]
    advantages: npt.NDArray[np.float64]

    def save(self, path: Path) -> None:
        """Writes the work."""
        np.savez(path, **asdict(self))

    @classmethod
    def load(cls, path: Path) -> Work:
        """Reads the work."""
        with np.load(path) as content:
            values = {name: content[name] for name in content.files}
        for name in ("num_rollouts", "num_tokens"):
            values[name] = int(values[name])
        return cls(**values)


def reward(token_ids: Any) -> float:
    """Of a rollout's tokens; no two rollouts have the same, so that none is without advantage."""
    return float(np.sin(np.asarray(token_ids, dtype=np.float64)).mean())


@dataclass
class Stopwatch:
    """Waits for this side's turn before each step, and tells what the step took.

    Attributes:
        answers: Where to; None neither waits nor tells.
        base_mb: The process's peak memory before the first step.
    """

    answers: Any = None
    base_mb: float = 0.0
    start: float = 0.0
    generated: float = 0.0

    def begin(self) -> None:
        """A step begins."""
        if self.answers is not None:
            wait()
        self.start = time.perf_counter()

    def rollouts_are_there(self) -> None:
        """Rollouts are generated and rewarded: what follows is the optimisation."""
        self.generated = time.perf_counter()

    def end(self) -> None:
        """The optimiser has stepped."""
        end = time.perf_counter()
        if self.answers is not None:
            tell(
                self.answers,
                generate_s=self.generated - self.start,
                optimise_s=end - self.generated,
                step_s=end - self.start,
                peak_mb=peak_mb() - self.base_mb,
            )


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def wait() -> None:
    """Waits for the word to go on; ends where nobody is left to give it."""
    if not sys.stdin.readline():
        raise SystemExit("The benchmark has ended.")


def tell(answers: Any, **what: Any) -> None:
    """Answers with one line."""
    answers.write(json.dumps(what) + "\n")
    answers.flush()


Train = Callable[[Path, Work, Stopwatch], dict[str, Any]]
"""Takes a step on each prompt; gives the last one's ``prompt_ids`` and, where rollouts are given,
their ``gradients``."""


def serve(train: Train) -> None:
    """Takes part in a comparison: a tiny step to warm up, timed steps, a step on given rollouts.

    Args:
        train: Starts from the exchange folder's weights each time.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    # Whatever libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    train(args.folder, Work.load(args.folder / "warm.npz"), Stopwatch())
    tell(answers, ready=True)
    train(args.folder, Work.load(args.folder / "timed.npz"), Stopwatch(answers, peak_mb()))
    wait()
    result = train(args.folder, Work.load(args.folder / "given.npz"), Stopwatch())
    np.savez(args.folder / f"{args.name}-gradients.npz", **result["gradients"])
    tell(answers, prompt_ids=result["prompt_ids"])
