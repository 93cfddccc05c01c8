"""What every benchmark shares: its arguments, and a report that says where numbers come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="within two minutes, to try it")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser


def machine() -> str:
    """The processor, its cores, memory and the libraries, in a line."""
    name = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, torch {torch.__version__}"


def commit() -> str:
    """The commit that is checked out, with a mark where the tree differs from it."""
    head = _git("rev-parse", "--short", "HEAD")
    return (
        f"{head}+changes" if _git("status", "--porcelain", "src", "configs", "callbacks") else head
    )


def report(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    """Rows and summary with command, commit and machine."""
    command = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "rows": list(rows),
        "summary": summary,
    }


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Prints rows as a table."""
    table = Table(title=title)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        cells = [_cell(v) for v in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def write_json(path: Path, content: dict[str, Any], indent: int | None = 1) -> None:
    """Writes a report atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    separators = (",", ":") if indent is None else None
    temporary.write_text(json.dumps(content, indent=indent, separators=separators) + "\n")
    os.replace(temporary, path)


def resumable(
    file: Path | None, cells: Sequence[dict[str, Any]], measure: Callable[[dict[str, Any]], Any]
) -> list[dict[str, Any]]:
    """Measures cells one by one; those already in ``file``, at the same machine, are kept.

    Args:
        file: The report; None keeps nothing.
        cells: What to measure; a row is known by its cell.
        measure: Makes a row of a cell.
    """
    kept: dict[str, Any] = {}
    if file and file.is_file():
        old = json.loads(file.read_text())
        if old.get("machine") == machine():
            kept = old.get("done", {})
    console = Console(stderr=True)
    for number, cell in enumerate(cells, 1):
        name = json.dumps(cell, sort_keys=True)
        if name not in kept:
            kept[name] = measure(cell)
            if file:
                write_json(file, {"machine": machine(), "done": kept})
        console.print(f"{number}/{len(cells)} {name}", highlight=False)
    return [kept[json.dumps(cell, sort_keys=True)] for cell in cells]


def write_markdown(name: str, title: str, text: str, content: dict[str, Any]) -> None:
    """Writes a report's page under docs/results/."""
    head = f"# {title}\n\n{text.strip()}\n\n"
    source = f"`{content['command']}` at {content['commit']} on {content['machine']}.\n\n"
    summary = markdown([content["summary"]])
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{head}{source}{summary}\n\n{markdown(content['rows'])}\n")


def conclude(args: argparse.Namespace, title: str, doc: str, content: dict[str, Any]) -> None:
    """Writes a report: to ``--json``, and unless it was only tried its page.

    Args:
        args: Of the command.
        title: Of the page.
        doc: The script's docstring. Its first line and its command are not on the page.
        content: The report.
    """
    if args.json:
        write_json(args.json, content)
    if not args.quick:
        name = Path(sys.argv[0]).stem
        write_markdown(name, title, doc.split("\n\n", 2)[2], content)
        print(f"Wrote {RESULTS / name}.md")


def _git(*words: str) -> str:
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
