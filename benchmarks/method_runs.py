"""Runs that are measured by their own results.json, curve and TensorBoard: rows and contrasts."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from mini_rows import Rows
from side_by_side import Children
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reframe_vl.evaluation.intervals import hierarchical_interval
from reframe_vl.runs import POLICY, RESULTS

ENDS = 10
"""Steps at the start and at the end of training that a measure is averaged over."""

Row = dict[str, Any]
Measure = Callable[[Row], float]

_writing = threading.Lock()
_making: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


@dataclass(frozen=True)
class Run:
    """A training with a method, or a frozen base's evaluation.

    Attributes:
        base: The shipped base checkpoint that it starts from.
    """

    method: str
    base: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Names its row."""
        return f"{self.method}-base{self.base}-seed{self.seed}"


class Laboratory:
    """Makes runs with the entry points, and rows of what they leave.

    Args:
        settings: Of the protocol.
        rows: Where rows go.
        logs: Run directories and outputs.
    """

    def __init__(self, settings: Any, rows: Rows, logs: Path) -> None:
        self.settings, self.rows = settings, rows
        # A run of another protocol must never be gone on with.
        self.logs = logs / rows.begin(settings)

    def train(self, name: str, overrides: Sequence[str], children: Children) -> Path:
        """The directory of a finished run, made or gone on with."""
        experiment = next(o for o in overrides if o.startswith("experiment="))
        folder = self.logs / experiment.partition("=")[2] / name
        self._script("train.py", name, [*overrides, f"run_name={name}", "resume=auto"], children)
        return folder

    def policy(self, name: str, overrides: Sequence[str], children: Children) -> Path:
        """A trained policy that several runs need: made once, whoever needs it first."""
        with _writing:
            lock = _making[self.logs / name]
        with lock:
            return self.train(name, overrides, children) / POLICY

    def evaluate(self, name: str, overrides: Sequence[str], children: Children) -> Path:
        """The directory of an evaluation."""
        folder = self.logs / "evaluation" / name
        self._script("eval.py", name, [*overrides, f"out={folder}"], children)
        return folder

    def once(self, folder: Path, command: Sequence[str], children: Children) -> None:
        """Runs a command that makes a folder, unless it is there as a whole."""
        with _writing:
            lock = _making[folder]
        with lock:
            if not folder.is_dir():
                part = folder.with_name(f"{folder.name}.part")
                shutil.rmtree(part, ignore_errors=True)
                words = [str(part) if word == str(folder) else word for word in command]
                children.run([sys.executable, *words], self.logs / "output" / f"{folder.name}.log")
                os.replace(part, folder)

    def write(self, run: Run, folder: Path, seconds: float, tags: Sequence[str]) -> None:
        """Makes a row of a finished run's directory, and clears the directory."""
        curve = folder / "curve.jsonl"
        lines = curve.read_text().splitlines() if curve.is_file() else []
        row = {
            **asdict(run),
            "fingerprint": self.logs.name,
            "commit": common.commit(),
            "machine": common.machine(),
            "seconds": round(seconds, 1),
            "results": json.loads((folder / RESULTS).read_text()),
            "curve": [json.loads(line) for line in lines],
            "series": series(folder / "tensorboard", tags),
        }
        with _writing:
            self.rows.begin(self.settings)
            self.rows.write(run.name, row)
        shutil.rmtree(folder, ignore_errors=True)

    def _script(self, script: str, name: str, words: Sequence[str], children: Children) -> None:
        command = [
            sys.executable,
            str(common.ROOT / "src" / script),
            *words,
            f"paths.log_dir={self.logs}",
            "num_threads=1",
            *(["callbacks.rollout_log.save=false"] if script == "train.py" else []),
        ]
        children.run(command, self.logs / "output" / f"{name}.log")


def timed(work: Callable[[], Path]) -> tuple[Path, float]:
    """What was made, and the seconds it took."""
    start = time.monotonic()
    return work(), time.monotonic() - start


def series(folder: Path, tags: Sequence[str]) -> dict[str, list[float]]:
    """A number a step for each tag, less what was logged twice."""
    if not folder.is_dir():
        return {}
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    known = set(board.Tags()["scalars"])
    return {
        tag: [v for _, v in sorted({e.step: e.value for e in board.Scalars(tag)}.items())]
        for tag in tags
        if tag in known
    }


class Table:
    """The finished rows of an experiment."""

    def __init__(self, runs: Sequence[Run], rows: Rows) -> None:
        self.missing = [run.name for run in runs if not rows.has(run.name)]
        self.rows = {run: rows.read(run.name) for run in runs if rows.has(run.name)}

    def level(self, method: str, measure: Measure) -> dict[str, Any] | None:
        """The mean of a measure over a method's runs."""
        return _interval({r: measure(row) for r, row in self.rows.items() if r.method == method})

    def difference(self, first: str, second: str, measure: Measure) -> dict[str, Any] | None:
        """The same of paired differences: same base, same seed; a frozen base is any seed's."""
        by_key = {(r.method, r.base, r.seed): row for r, row in self.rows.items()}
        found = {}
        for run, row in self.rows.items():
            other = by_key.get((second, run.base, run.seed)) or by_key.get((second, run.base, 0))
            if run.method == first and other is not None:
                found[run] = measure(row) - measure(other)
        return _interval(found)


def _interval(values: Mapping[Run, float]) -> dict[str, Any] | None:
    known = {run: value for run, value in values.items() if np.isfinite(value)}
    if not known:
        return None
    found = hierarchical_interval(
        np.array(list(known.values()), np.float64),
        ["run"] * len(known),
        bases=[run.base for run in known],
        seeds=[run.seed for run in known],
    ).to_dict()
    return {**found, "runs": len(known)}


def at_start(tag: str) -> Measure:
    """A logged number's mean over the first steps."""
    return lambda row: _mean(row["series"].get(tag, [])[:ENDS])


def at_end(tag: str) -> Measure:
    """And over the last ones."""
    return lambda row: _mean(row["series"].get(tag, [])[-ENDS:])


def result(*path: str) -> Measure:
    """A measure of results.json."""

    def read(row: Row) -> float:
        entry: Any = row["results"]
        for name in path:
            entry = (entry or {}).get(name)
        return float("nan") if entry is None else float(entry["value"])

    return read


def cell(found: dict[str, Any] | None) -> str:
    """A number with its interval, for a table."""
    return (
        "-"
        if found is None
        else f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def write_page(
    name: str, title: str, text: str, folder: Path, content: dict[str, Any], protocol: Row
) -> None:
    """Writes an experiment's page: what was done, its tables, where it is from."""
    source = (
        f"`{content['command']}` at {content['commit']} on {content['machine']}. Protocol "
        f"`{protocol['fingerprint']}`, set at {protocol['first_commit']}; each run's row is in "
        f"`{name}/rows/`."
    )
    missing = content["summary"]["missing"]
    state = f"Runs still missing: {', '.join(missing)}." if missing else "All runs are done."
    tables = "\n\n".join(
        f"## {heading}\n\n{common.markdown(rows)}" for heading, rows in content["tables"].items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    page = f"# {title}\n\n{state}\n\n{text.strip()}\n\n{tables}\n\n{source}\n"
    (folder / f"{name}.md").write_text(page)


def cells(
    entries: Mapping[str, Mapping[str, dict[str, Any] | None]], columns: Sequence[str]
) -> list[Row]:
    """Measures by name as rows of a table; what has none of them has no row."""
    return [
        {"": name, **{column: cell(found.get(column)) for column in columns}}
        for name, found in entries.items()
        if any(found.values())
    ]


def publish(
    name: str,
    title: str,
    text: str,
    folder: Path,
    rows: Rows,
    content: dict[str, Any],
    tables: Mapping[str, list[Row]],
    json_file: Path | None,
) -> None:
    """Writes an experiment's JSON and page, and prints its tables."""
    common.write_json(json_file or folder / f"{name}.json", content)
    write_page(name, title, text, folder, {**content, "tables": tables}, rows.protocol)
    for heading, part in tables.items():
        common.show(part, heading)
