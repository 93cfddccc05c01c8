"""Fuzzed turns: each must be an executed call, a refusal with a reason, an answer or an end.

A turn is a valid one with up to a few changes, noise between tags, plain noise, or a piece of text
repeated up to 50,000 characters. It is read by a codec, its call is checked and executed at a small
view, and its answer is compared with the reference. Every hundredth turn also begins an episode of
fuzzed turns, whose loss masks, rewards and record are checked.

An exception, a broken rule or ten seconds of one turn stop the run, which then names the turn:
``--only`` plays it again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import common
import numpy as np
import torch
from fuzz_rules import codecs, play, prompt, read, samples
from fuzz_turns import turn
from PIL import Image

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.tools.base import Reason

TURNS, QUICK_TURNS, CHUNK = 1_000_000, 50_000, 2_500
EPISODE_EVERY = 100
SECONDS_A_TURN = 10


@dataclass
class Tally:
    """What became of some turns."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: tuple[float, int, int] = (0.0, 0, 0)
    """Milliseconds of the processor, the turn, its characters."""
    processor_s: float = 0.0

    def add(self, other: Tally) -> None:
        """Adds what became of others."""
        self.outcomes += other.outcomes
        self.slowest = max(self.slowest, other.slowest)
        self.processor_s += other.processor_s


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"A turn took over {SECONDS_A_TURN} s of the processor.")


@contextmanager
def watched(index: int, text: str) -> Iterator[None]:
    """Ends what hangs, and names the turn in whatever is raised."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS_A_TURN)
    try:
        yield
    except BaseException as error:
        # Nothing is swallowed: the note travels with the error, through the pool too.
        error.add_note(f"turn {index} (benchmarks/fuzz.py --only {index}): {text[:2_000]!a}")
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(job: tuple[range, Path]) -> Tally:
    """Plays some turns; each depends on its index alone."""
    turns, strip = job
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _give_up)
    tally, began = Tally(), time.process_time()
    for index in turns:
        rng = random.Random(index)
        codec, number = rng.choice(codecs()), rng.randrange(len(samples(strip)))
        sample = samples(strip)[number]
        scene = replace(prompt(codec, strip, number).scene, reorder_reversed=rng.random() < 0.3)
        text, truncated = turn(rng, codec, sample.modality), rng.random() < 0.3
        with watched(index, text):
            start = time.thread_time()
            tally.outcomes[read(text, codec, truncated, scene, sample)] += 1
            spent = 1e3 * (time.thread_time() - start)
            tally.slowest = max(tally.slowest, (spent, index, len(text)))
            if index % EPISODE_EVERY == 0:
                tally.outcomes.update(play(rng, codec, strip, number))
    tally.processor_s = time.process_time() - began
    return tally


def main() -> None:
    """Fuzzes on several processes and reports what became of the turns."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", type=int, help="play this turn alone, in this process")
    args = parser.parse_args()
    count = QUICK_TURNS if args.quick else TURNS
    tally, start = Tally(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        strip = Path(folder) / "strip.png"
        pixels = np.random.default_rng(0).integers(0, 256, (77, 1333, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(strip)
        if args.only is not None:
            tally.add(run((range(args.only, args.only + 1), strip)))
        else:
            chunks = [range(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)]
            with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
                jobs = zip(chunks, itertools.repeat(strip), strict=False)
                for part in pool.imap_unordered(run, jobs):
                    tally.add(part)
    seconds = time.perf_counter() - start
    rows = [
        {"outcome": outcome, "kind": str(kind), "count": number}
        for (outcome, kind), number in sorted(
            tally.outcomes.items(), key=lambda item: (item[0][0], -item[1])
        )
    ]
    common.show(rows, "what became of fuzzed turns")
    if args.only is not None:
        return
    slowest_ms, slowest_turn, slowest_characters = tally.slowest
    reasons = {kind for _, kind in tally.outcomes} & set(Reason)
    summary = {
        "completions": count,
        "episodes": len(range(0, count, EPISODE_EVERY)),
        # A run that meets one stops and writes no report.
        "exceptions": 0,
        "reasons_seen": f"{len(reasons)} of {len(Reason)}",
        "completions_per_s": count / seconds,
        # Unlike the former, the same beside other programs.
        "completions_per_core_s": count / tally.processor_s,
        "seconds": seconds,
        "jobs": args.jobs,
        "slowest_ms": slowest_ms,
        "slowest_turn": slowest_turn,
        "slowest_characters": slowest_characters,
    }
    content = common.report(rows, summary)
    common.show([summary], "summary")
    if args.json or not args.quick:
        common.write_json(args.json or common.RESULTS / "fuzz.json", content)
    if not args.quick:
        common.write_markdown("fuzz", "Fuzzed turns", __doc__ or "", content)


if __name__ == "__main__":
    main()
