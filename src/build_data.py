"""Builds one record file from the annotations and media of one source or several.

python src/build_data.py sources=[charades_sta] annotations=FILE media=DIR out=FILE.jsonl

Records go through the stages of the data pipeline (docs/data.md) that ``stages`` names.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from reframe_vl.data.contact_sheet import SpreadChoice, write_contact_sheet
from reframe_vl.data.evidence import MAX_FRAMES
from reframe_vl.data.formats.media_facts import MediaFacts
from reframe_vl.data.media import MediaError
from reframe_vl.data.output_file import check_output, page_of
from reframe_vl.data.pipeline import (
    ASKING,
    STAGES,
    Disposition,
    PipelineSettings,
    dispositions,
    finished_records,
    make_stages,
    run_pipeline,
)
from reframe_vl.data.records import Record, write_records
from reframe_vl.data.report import RecordError, Report
from reframe_vl.data.sources import SOURCES
from reframe_vl.data.stages.base import Stage, adapter_of, open_file
from reframe_vl.data.stages.finalise import FinaliseSettings
from reframe_vl.data.stages.held_out import read_held_out
from reframe_vl.data.stages.looks import LookSettings
from reframe_vl.data.stages.pool import NAME as POOL
from reframe_vl.data.stages.pool import PoolSettings
from reframe_vl.data.stages.runner import check_batch_size
from reframe_vl.data.stages.store import only_run
from reframe_vl.data.summary import Labels, summary_table
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.cache import AnswerCache
from reframe_vl.data.video import GridRule
from reframe_vl.rollout.make_verifier import make_verifier

logger = logging.getLogger(__name__)


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
    max_frames: int = MAX_FRAMES
    strict: bool = False
    stages: list[str] = field(default_factory=lambda: ["pool", "finalise"])
    work: Path | None = None
    verifiers: Any = None
    held_out: list[str] = field(default_factory=list)
    near_distance: float | None = 4.0
    batch_size: int = 64
    sheet: int = 12


_NAMES = ("sources", "stages", "held_out")
_WANTED = {
    "annotations": "a file, a folder of files, or a list of them",
    "media": "the folder of the images or videos, or null",
    "sources": "one name or several, as in [coco,voc]",
    "out": "the record file to write, FILE.jsonl",
    "grid": "it a number of frames a second, fps, and a whole number, max_frames",
    "max_frames": "a whole number",
    "strict": "true or false",
    "stages": "one name or several, as in [pool,finalise]",
    "work": "a folder, or null",
    "held_out": "one record file or several, as in [FILE,FILE]",
    "near_distance": "a number, or null",
    "batch_size": "a whole number",
    "sheet": "a whole number",
    "verifiers": "each a name, as in {strong:{url:URL,model:NAME}}",
}
"""What each setting is."""


@dataclass
class Tally:
    """What became of the rows of one source.

    Attributes:
        files: The annotation files or folders.
        media: The folder of its media; None where they are not read.
    """

    name: str
    files: list[Path]
    media: Path | None
    report: Report


@hydra.main(version_base=None, config_path="../configs", config_name="data")
def main(cfg: DictConfig) -> None:
    """Reads the rows, writes the records and says what was odd."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise SystemExit(
            f"Not given: {', '.join(missing)}. Add {' '.join(f'{key}=…' for key in missing)} to "
            f"the command; configs/data.yaml says what each is. Sources: {', '.join(SOURCES)}."
        )
    try:
        build(read_config(cfg))
    except (RecordError, MediaError, OSError) as error:
        raise SystemExit(f"{error}\nNothing was written.") from error
    except KeyboardInterrupt:
        kept = "what was judged is kept in its folder, and the same command goes on from there"
        lost = "nothing was kept, since no folder work= was given"
        raise SystemExit(
            f"Stopped. No record file was written; {kept if cfg.get('work') else lost}."
        ) from None


def read_config(cfg: DictConfig) -> BuildConfig:
    """The settings, each of its type; one name stands for a list of one.

    Raises:
        SystemExit: A setting is of another type.
    """
    given: Any = OmegaConf.masked_copy(cfg, list(BuildConfig.__dataclass_fields__))
    typed: Any = OmegaConf.structured(BuildConfig)
    for name in given:
        value = given[name]
        if value == "":
            raise SystemExit(f"{name}= is empty: give {_WANTED[name]}.")
        if name in _NAMES and isinstance(value, str):
            value = [value]
        try:
            if name in _NAMES and not all(isinstance(item, str) for item in value):
                raise TypeError("what is listed is no name")
            typed = OmegaConf.merge(typed, {name: value})
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            raise SystemExit(f"{name}={value}: give {_WANTED[name]}.") from error
    config = OmegaConf.to_object(typed)
    assert isinstance(config, BuildConfig)
    return config


def build(config: BuildConfig) -> None:
    """Runs the chosen sources and stages; prints the summary."""
    # One line a request would bury everything else.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    check_batch_size(config.batch_size)
    _check_numbers(config)
    tallies = [_tally(config, name) for name in _checked_names(config.sources)]
    grid = _grid(config.grid)
    _check_stages(config)
    _check_output(config, tallies)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} {task.fields[said]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with ExitStack() as opened:
        work = config.work or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        opened.enter_context(only_run(work))
        stages = _stages(config, tallies, work, opened)
        opened.enter_context(progress)
        facts = MediaFacts(work / "media.jsonl")
        read = _all_records(tallies, grid, facts, progress)
        bars: dict[str, TaskID] = {}

        def told(stage: str, done: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=None, said="records")
            progress.update(bars[stage], advance=done)

        run_pipeline(stages, read, work, config.batch_size, told)
        found = dispositions(work, config.stages)
        _refuse_nothing(tallies, found)
        labels: Labels = Counter()
        shown = SpreadChoice(config.sheet)
        with_media = {tally.name for tally in tallies if tally.media is not None}
        finished = finished_records(work, config.stages[-1])
        write_records(config.out, _noted(finished, labels, shown, with_media))
    console = Console()
    reports = {tally.name: tally.report for tally in tallies}
    title = escape(f"{', '.join(config.sources)} → {config.out}")
    console.print(summary_table(title, reports, found, labels))
    if shown.chosen():
        sheet = page_of(config.out)
        write_contact_sheet(sheet, str(config.out), shown.chosen(), open_file)
        console.print(f"To look at: {escape(str(sheet))}")


def _noted(
    records: Iterator[Record], labels: Labels, shown: SpreadChoice, with_media: set[str]
) -> Iterator[Record]:
    """The records, counted by label; some whose media are at hand are picked to be shown."""
    for record in records:
        label = record.applicability or "no applicability"
        labels[adapter_of(record.id), record.modality, label] += 1
        if adapter_of(record.id) in with_media:
            shown.add(record)
        yield record


def _stages(
    config: BuildConfig, tallies: list[Tally], work: Path, opened: ExitStack
) -> list[Stage]:
    """The stages that are asked for, with their verifiers."""
    unread = frozenset(tally.name for tally in tallies if tally.media is None)
    open_media = None if len(unread) == len(tallies) else open_file
    if unread and open_media is not None:
        logger.warning(
            "No media= of %s: copies of its files, and those of evaluations, are known by source "
            "and name alone.",
            ", ".join(sorted(unread)),
        )
    settings = PipelineSettings(
        pool=PoolSettings(config.near_distance),
        looks=LookSettings(max_frames=config.max_frames),
        finalise=FinaliseSettings(max_frames=config.max_frames),
    )
    try:
        held_out = read_held_out(list(map(Path, config.held_out)))
        askers = []
        if ASKING & set(config.stages):
            cache = AnswerCache(work / "answers.sqlite")
            opened.callback(cache.close)
            given = _verifiers(config.verifiers).items()
            askers = [Asker(make_verifier(name, asked), cache) for name, asked in given]
        return make_stages(config.stages, settings, open_media, askers, held_out, unread)
    except RecordError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error


def _verifiers(given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise SystemExit(
            f"verifiers={given}: give each a name, as in {{strong:{{url:URL,model:NAME}}}}."
        )
    return given or {}


def _checked_names(names: list[str]) -> list[str]:
    unknown = sorted(set(names) - SOURCES.keys())
    if unknown or not names or len(set(names)) < len(names):
        wrong = f"{', '.join(unknown)} is unknown" if unknown else "each is named once"
        raise SystemExit(
            f"sources=[{','.join(names)}]: {wrong}; choose one or more of {', '.join(SOURCES)}."
        )
    return names


def _check_stages(config: BuildConfig) -> None:
    """Refuses what no stage that is asked for would use."""
    if config.held_out and POOL not in config.stages:
        raise SystemExit(
            f"held_out= is used by the stage {POOL} alone: add it to stages=, or leave held_out= "
            "out."
        )
    if config.verifiers and not ASKING & set(config.stages):
        asking = ", ".join(name for name in STAGES if name in ASKING)
        raise SystemExit(
            f"verifiers= are asked by the stages {asking} alone: add one to stages=, or leave "
            "verifiers= out."
        )


def _check_numbers(config: BuildConfig) -> None:
    least = {"max_frames": 1, "sheet": 0, "near_distance": 0}
    for name, minimum in least.items():
        value = getattr(config, name)
        if value is not None and not minimum <= value < float("inf"):
            raise SystemExit(f"{name}={value}: give a number of at least {minimum}.")


def _tally(config: BuildConfig, name: str) -> Tally:
    given = _of_source("annotations", config.annotations, name, config.sources)
    several = given if isinstance(given, list) else [given]
    if not several or not all(isinstance(path, str) and path for path in several):
        raise SystemExit(
            f"annotations={given} names no files of {name}: give a file, a folder of files, or a "
            "list of them."
        )
    files = [Path(path) for path in several]
    for path in files:
        if not path.exists():
            raise SystemExit(f"annotations={path} is not there: give the annotation file.")
    folder = _of_source("media", config.media, name, config.sources)
    is_folder = isinstance(folder, str) and folder != "" and Path(folder).is_dir()
    if folder is not None and not is_folder:
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
    tallies: list[Tally], grid: GridRule, facts: MediaFacts, progress: Progress
) -> Iterator[Record]:
    for tally in tallies:
        task = progress.add_task(tally.name, total=None, said="rows")
        source = SOURCES[tally.name](tally.files, tally.media, grid, facts)
        for record in source.records(tally.report):
            rows = tally.report.num_kept + tally.report.num_left_out
            progress.update(task, completed=rows, said=f"rows, {tally.report.num_kept} kept")
            yield record
        rows = tally.report.num_kept + tally.report.num_left_out
        said = f"rows, {tally.report.num_kept} kept"
        progress.update(task, total=rows, completed=rows, said=said)


def _refuse_nothing(tallies: list[Tally], found: list[Disposition]) -> None:
    if any(disposition.verdict != "dropped" for disposition in found):
        return
    reasons = [
        f"{tally.name}: {number} {reason}"
        for tally in tallies
        for (reason, _), number in tally.report.count_by_reason().items()
    ]
    dropped = Counter((adapter_of(d.id), d.reason) for d in found)
    reasons += [f"{adapter}: {number} {reason}" for (adapter, reason), number in dropped.items()]
    raise RecordError(f"No record was made ({', '.join(reasons) or 'there are no rows'}).")


def _check_output(config: BuildConfig, tallies: list[Tally]) -> None:
    """The record file replaces what stands at its place."""
    folders = [
        path
        for tally in tallies
        for path in tally.files
        if path.is_dir() and config.out.suffix.lower() in SOURCES[tally.name].suffixes
    ]
    inputs = [*(path for tally in tallies for path in tally.files), *map(Path, config.held_out)]
    check_output(config.out, inputs, folders, config.work, has_page=config.sheet > 0)


if __name__ == "__main__":
    main()
