"""Makes a page of rollouts: ``python -m reframe_vl.viewer RUN [RUN …] [--out FILE]``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from reframe_vl.data.report import RecordError
from reframe_vl.viewer.export import export
from reframe_vl.viewer.page import build_page
from reframe_vl.viewer.pictures import Pictures
from reframe_vl.viewer.pieces import find_splitter
from reframe_vl.viewer.reading import entries, find_runs

_LARGE_MB = 150


def main(argv: Sequence[str] | None = None) -> Path:
    """Writes the page and says where it is.

    Raises:
        SystemExit: There is nothing to show, or it cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m reframe_vl.viewer",
        description="Makes one HTML file of the rollouts of runs, to look at in any browser.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--out", type=Path, help="the file (default: RUN/rollouts.html)")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=slice(None),
        metavar="FIRST:END:EVERY",
        help="which steps, as Python slices: 0:100:20 is 0, 20, …, 80 (default: all)",
    )
    parser.add_argument(
        "--side",
        type=_side,
        default=320,
        metavar="PIXELS",
        help="longest side of an image (default: 320; 0 leaves images out)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json or its folder, where the run has none"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    first: Path = args.runs[0]
    out: Path = args.out or (first.parent if first.name == "rollouts" else first) / "rollouts.html"
    try:
        runs = find_runs(args.runs)
        splitters = [find_splitter(run, args.tokenizer) for run in runs]
        data = export(runs, entries(runs, args.steps), splitters, Pictures(args.side))
        if not data.num_rollouts:
            raise ValueError("No rollouts are of these steps: ask for others with --steps.")
        page = build_page(", ".join(run.name for run in runs), data)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except (OSError, ValueError, RecordError) as error:
        sys.exit(f"{error}")
    megabytes = len(page) / 1e6
    print(f"{data.num_rollouts:,} rollouts, {megabytes:.1f} MB: {out}")
    if megabytes > _LARGE_MB:
        print("That is much for a browser: take fewer steps (--steps 0:1000:20) or --side 160.")
    return out


def _steps(text: str) -> slice:
    parts = [int(part) if part else None for part in text.split(":")]
    if len(parts) == 1 and parts[0] is not None:
        return slice(parts[0], parts[0] + 1)
    if not 2 <= len(parts) <= 3 or any(part is not None and part < 0 for part in parts):
        raise ValueError(text)
    if parts[2:] == [0]:
        raise ValueError(text)
    return slice(*parts)


def _side(text: str) -> int:
    side = int(text)
    if side and side < 16:
        raise ValueError(text)
    return side


if __name__ == "__main__":
    main()
