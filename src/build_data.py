"""Builds one record file from the annotations and media of one source or several.

python src/build_data.py sources=[charades_sta] annotations=FILE media=DIR out=FILE.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from reframe_vl.data.records import Record, write_records
from reframe_vl.data.report import RecordError, Report
from reframe_vl.data.sources import SOURCES
from reframe_vl.data.video import GridRule


@dataclass
class GridConfig:
    """A ``GridRule``, as settings are read."""

    fps: float
    max_frames: int


@dataclass
class BuildConfig:
    """What configs/data.yaml holds."""

    sources: list[str]
    annotations: Any
    media: Any
    out: Path
    grid: GridConfig
    max_frames: int
    strict: bool


@dataclass
class Tally:
    """What became of the rows of one source.

    Attributes:
        files: The annotation files or folders.
        media: The folder of its media; None where they are not read.
        labels: Records by (modality, applicability).
    """

    name: str
    files: list[Path]
    media: Path | None
    report: Report
    labels: Counter[tuple[str, str]] = field(default_factory=Counter)


@hydra.main(version_base=None, config_path="../configs", config_name="data")
def main(cfg: DictConfig) -> None:
    """Reads the rows, writes the records and says what was odd."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise SystemExit(
            f"Not given: {', '.join(missing)}. Add {' '.join(f'{key}=…' for key in missing)} to "
            f"the command; configs/data.yaml says what each is. Sources: {', '.join(SOURCES)}."
        )
    names = list(BuildConfig.__dataclass_fields__)
    typed = OmegaConf.merge(OmegaConf.structured(BuildConfig), OmegaConf.masked_copy(cfg, names))
    config = OmegaConf.to_object(typed)
    assert isinstance(config, BuildConfig)
    try:
        build(config)
    except (RecordError, OSError) as error:
        raise SystemExit(f"{error}\nNothing was written.") from error


def build(config: BuildConfig) -> None:
    """Runs the chosen sources; prints the summary."""
    tallies = [_tally(config, name) for name in _checked_names(config.sources)]
    _refuse_to_overwrite_inputs(config.out, tallies)
    grid = _grid(config.grid)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} rows, {task.fields[kept]} kept"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        write_records(config.out, _all_records(tallies, grid, config.max_frames, progress))
    Console().print(_summary(config, tallies))


def _checked_names(names: list[str]) -> list[str]:
    unknown = sorted(set(names) - SOURCES.keys())
    if unknown or not names or len(set(names)) < len(names):
        wrong = f"{', '.join(unknown)} is unknown" if unknown else "each is named once"
        raise SystemExit(
            f"sources=[{','.join(names)}]: {wrong}; choose one or more of {', '.join(SOURCES)}."
        )
    return names


def _tally(config: BuildConfig, name: str) -> Tally:
    given = _of_source("annotations", config.annotations, name, config.sources)
    files = [Path(path) for path in (given if isinstance(given, list) else [given])]
    for path in files:
        if not path.exists():
            raise SystemExit(f"annotations={path} is not there: give the annotation file.")
    folder = _of_source("media", config.media, name, config.sources)
    if folder is not None and not Path(folder).is_dir():
        raise SystemExit(f"media={folder} is no folder: give the folder of the images or videos.")
    media = None if folder is None else Path(folder)
    return Tally(name, files, media, Report(strict=config.strict))


def _of_source(key: str, given: Any, name: str, names: list[str]) -> Any:
    """What is given for one source: by name where there are several."""
    if isinstance(given, dict):
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise SystemExit(f"{key}={{{unknown[0]}:…}}: {unknown[0]} is not among the sources.")
        if name not in given and key == "annotations":
            raise SystemExit(f"{key} has no file of {name}: add {name}:FILE to {key}={{…}}.")
        return given.get(name)
    if key == "annotations" and len(names) > 1:
        raise SystemExit(
            f"Several sources need their annotations by name: 'annotations={{{names[0]}:FILE,"
            f"{names[1]}:[FILE,FILE]}}'."
        )
    return given


def _grid(given: GridConfig) -> GridRule:
    try:
        return GridRule(given.fps, given.max_frames)
    except ValueError as error:
        raise SystemExit(f"grid: {error}") from error


def _all_records(
    tallies: list[Tally], grid: GridRule, max_frames: int, progress: Progress
) -> Iterator[Record]:
    for tally in tallies:
        task = progress.add_task(tally.name, total=None, kept=0)
        source = SOURCES[tally.name](tally.files, tally.media, grid, max_frames)
        for record in source.records(tally.report):
            label = record.applicability or "no applicability"
            tally.labels[record.modality, label] += 1
            rows = tally.report.num_kept + tally.report.num_left_out
            progress.update(task, completed=rows, kept=tally.report.num_kept)
            yield record
        rows = tally.report.num_kept + tally.report.num_left_out
        progress.update(task, total=rows, completed=rows, kept=tally.report.num_kept)
    if not any(tally.report.num_kept for tally in tallies):
        reasons = ", ".join(
            f"{tally.name}: {n} {reason}"
            for tally in tallies
            for (reason, _), n in tally.report.count_by_reason().items()
        )
        raise RecordError(f"No record was made ({reasons or 'there are no rows'}).")


def _refuse_to_overwrite_inputs(path: Path, tallies: list[Tally]) -> None:
    """The record file replaces what stands at its place."""
    out = path.resolve()
    if out.is_dir():
        raise SystemExit(f"out={path} is a folder: give the record file, FILE.jsonl.")
    if not out.exists():
        return
    for tally in tallies:
        is_file = any(out.samefile(file) for file in tally.files)
        is_below = any(
            out.is_relative_to(folder.resolve()) and out.suffix != ".jsonl"
            for folder in (*tally.files, *([tally.media] if tally.media else []))
        )
        if is_file or is_below:
            raise SystemExit(
                f"out={path} is one of the files to read and would be overwritten: give the "
                "record file a name of its own, FILE.jsonl."
            )


def _summary(config: BuildConfig, tallies: list[Tally]) -> Table:
    table = Table(title=f"{', '.join(config.sources)} → {config.out}", title_justify="left")
    table.add_column("rows")
    for tally in tallies:
        table.add_column(tally.name, justify="right")
    rows: dict[str, list[int]] = {}

    def count(label: str, at: int, number: int) -> None:
        rows.setdefault(label, [0] * len(tallies))[at] += number

    for at, tally in enumerate(tallies):
        count("in", at, tally.report.num_kept + tally.report.num_left_out)
    for at, tally in enumerate(tallies):
        count("kept", at, tally.report.num_kept)
    for at, tally in enumerate(tallies):
        for (modality, label), number in sorted(tally.labels.items()):
            count(f"  {modality}, {label}", at, number)
    for at, tally in enumerate(tallies):
        count("dropped", at, tally.report.num_left_out)
    for kept, head in ((False, ""), (True, " (kept)")):
        for at, tally in enumerate(tallies):
            problems = Counter(
                (problem.stage, problem.reason)
                for problem in tally.report.problems
                if problem.kept is kept
            )
            for (stage, reason), number in problems.most_common():
                count(f"  {stage}: {reason}{head}", at, number)
    for label, numbers in rows.items():
        table.add_row(label, *map(str, numbers))
    return table


if __name__ == "__main__":
    main()
