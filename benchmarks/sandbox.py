"""The Python tool's sandbox: how long an interpreter takes to start, and a call to run.

A start is from asking the pool to the result of a first, trivial call: cold where the pool keeps
none ready, warm where it does. Calls are timed in one interpreter. Then rollouts of some calls each
are played, every tenth of which crashes its interpreter, and what they leave is counted: processes
below this one, dead ones too, open files, and temporary files.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

sys.path.insert(0, str(common.ROOT / "src"))

from reframe_vl.tools.python_exec import PythonSession
from reframe_vl.tools.sandbox_pool import SandboxPool
from reframe_vl.tools.sandbox_process import Limits
from reframe_vl.types import RGB, Box, ImageMedia, Media, VideoMedia

MAX_PIXELS = 512 * 512
WARM = 2
CALLS = {
    "call": "1 + 1",
    "call with 4,000 characters": "print('x' * 4000)",
    "call with an image of 512x512": "image_0.resize((512, 512))",
    "call with a figure": "plt.plot([1, 2]); plt.show()",
}


class Image(ImageMedia):
    """A megapixel of noise."""

    key = "noise"
    size = (1024, 1024)
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)

    def look(self, box: Box | None, max_pixels: int) -> RGB:
        return self.pixels


class Video(VideoMedia):
    """Noise that costs nothing to decode."""

    key = "clip"
    size = (512, 512)
    timestamps_s = tuple(i / 4 for i in range(64))

    def look(self, frames: Sequence[int], max_pixels: int) -> list[RGB]:
        return [Image.pixels[:512, :512]] * len(frames)


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def row(what: str, seconds: list[float]) -> dict[str, Any]:
    """One line of the table."""
    median = statistics.median(seconds)
    return {
        "what": what,
        "runs": len(seconds),
        "median ms": 1e3 * median,
        "most ms": 1e3 * max(seconds),
        "per second": 1 / median,
    }


def starts(repeats: int, warm: int) -> list[float]:
    """Seconds from asking to a first result; the next one has time to get ready in between."""
    seconds = []
    with SandboxPool(warm) as pool:
        for _ in range(repeats):
            session = PythonSession(pool, Image())
            if warm:
                pool.end(pool.take())
                time.sleep(1)
            seconds += timed(lambda session=session: session.run("1", MAX_PIXELS), 1)
            session.close()
    return seconds


def calls(code: str, media: Media, repeats: int) -> list[float]:
    """Seconds of each call in one interpreter that has made such a call before."""
    with SandboxPool(0, Limits(cpu_s=600)) as pool:
        session = PythonSession(pool, media)
        session.run(code, MAX_PIXELS)
        return timed(lambda: session.run(code, MAX_PIXELS), repeats)


def leftovers(folder: str) -> dict[str, set[str]]:
    """What is there of each kind that rollouts could leave behind."""
    parents: dict[str, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[stat.parent.name] = stat.read_text().rpartition(")")[2].split()[1]
    below = {str(os.getpid())}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {
        "processes": below,
        "descriptors": set(os.listdir("/proc/self/fd")),
        "files": set(os.listdir(folder)),
    }


def play(rollouts: int, calls_each: int, folder: str) -> tuple[float, dict[str, int]]:
    """Seconds a call, starts included, and how many things are left over.

    Args:
        folder: Where temporary files are made.
    """
    before = leftovers(folder)
    start = time.perf_counter()
    with SandboxPool(WARM) as pool:
        for number in range(rollouts):
            session = PythonSession(pool, Image())
            for call in range(calls_each):
                crash = number % 10 == 0 and call == 0
                session.run("import os; os._exit(1)" if crash else f"x = {call}", MAX_PIXELS)
            session.close()
    seconds = (time.perf_counter() - start) / (rollouts * calls_each)
    after = leftovers(folder)
    return seconds, {kind: len(after[kind] - before[kind]) for kind in before}


def main() -> None:
    """Measures and reports."""
    args = common.arguments(__doc__ or "").parse_args()
    few, many = (5, 20) if args.quick else (10, 100)
    rollouts, calls_each = (25, 40) if args.quick else (100, 10)
    rows = [
        row("start, cold", starts(few, 0)),
        row("start, warm", starts(few, WARM)),
        *(row(what, calls(code, Image(), many)) for what, code in CALLS.items()),
        row("call with 8 frames of 512x512", calls("f = video[0:64:8]", Video(), many)),
    ]
    # A folder of its own: other programs use the common one.
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        seconds, left = play(rollouts, calls_each, tempfile.tempdir)
    rows.append(row(f"call, of {rollouts} rollouts with {calls_each} each", [seconds]))
    by_name = {r["what"]: r for r in rows}
    summary = {
        "calls_per_s": by_name["call"]["per second"],
        "start_cold_s": by_name["start, cold"]["median ms"] / 1e3,
        "start_warm_s": by_name["start, warm"]["median ms"] / 1e3,
        "calls": rollouts * calls_each,
        "processes_left": left["processes"],
        "descriptors_left": left["descriptors"],
        "files_left": left["files"],
    }
    content = common.report(rows, summary)
    common.show(rows, "sandbox")
    common.show([summary], "summary")
    file = args.json or (None if args.quick else common.RESULTS / "sandbox.json")
    if file:
        common.write_json(file, content)
    if not args.quick:
        common.write_markdown("sandbox", "The Python tool's sandbox", __doc__ or "", content)


if __name__ == "__main__":
    main()
