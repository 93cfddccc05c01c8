"""Builds a record file from a source's annotations and media.

python src/build_data.py source=visual_cot_sroie annotations=FILE images=DIR out=FILE.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from reframe_vl.data.records import Record, write_records
from reframe_vl.data.report import RecordError, Report
from reframe_vl.data.sources import SOURCES


@dataclass
class BuildConfig:
    """What configs/data.yaml holds."""

    source: str
    annotations: Path
    images: Path
    out: Path
    strict: bool


@hydra.main(version_base=None, config_path="../configs", config_name="data")
def main(cfg: DictConfig) -> None:
    """Reads the rows, writes the records and says what was odd."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise SystemExit(
            f"Not given: {', '.join(missing)}. Add {' '.join(f'{key}=…' for key in missing)} to "
            f"the command; configs/data.yaml says what each is. Sources: {', '.join(SOURCES)}."
        )
    names = [field.name for field in fields(BuildConfig)]
    typed = OmegaConf.merge(OmegaConf.structured(BuildConfig), OmegaConf.masked_copy(cfg, names))
    config = OmegaConf.to_object(typed)
    assert isinstance(config, BuildConfig)
    try:
        build(config)
    except (RecordError, OSError) as error:
        raise SystemExit(f"{error}\nNothing was written.") from error


def build(config: BuildConfig) -> None:
    """Runs the chosen source; prints the summary."""
    if config.source not in SOURCES:
        raise SystemExit(f"source={config.source} is unknown: choose one of {', '.join(SOURCES)}.")
    if not config.annotations.is_file():
        raise SystemExit(f"annotations={config.annotations} is no file: give the annotation file.")
    if not config.images.is_dir():
        raise SystemExit(f"images={config.images} is no folder: give the folder of the images.")
    _refuse_to_overwrite_inputs(config)
    report, labels = Report(strict=config.strict), Counter[str]()
    source = SOURCES[config.source](config.annotations, config.images)

    def counted() -> Iterator[Record]:
        for record in source.records(report):
            labels[record.applicability or "no evidence"] += 1
            yield record
        if not report.num_kept:
            reasons = ", ".join(
                f"{n} {reason}" for (reason, _), n in report.count_by_reason().items()
            )
            raise RecordError(f"{config.annotations} gave no record ({reasons or 'it is empty'}).")

    write_records(config.out, counted())
    Console().print(_summary(config, report, labels))


def _refuse_to_overwrite_inputs(config: BuildConfig) -> None:
    """The record file replaces what stands at its place."""
    out = config.out.resolve()
    if out.is_dir():
        raise SystemExit(f"out={config.out} is a folder: give the record file, FILE.jsonl.")
    is_media = out.is_relative_to(config.images.resolve()) and out.suffix != ".jsonl"
    if out.exists() and (out.samefile(config.annotations) or is_media):
        raise SystemExit(
            f"out={config.out} is one of the files to read and would be overwritten: give the "
            "record file a name of its own, FILE.jsonl."
        )


def _summary(config: BuildConfig, report: Report, labels: Counter[str]) -> Table:
    table = Table(title=f"{config.source} → {config.out}", title_justify="left")
    table.add_column("rows")
    table.add_column("number", justify="right")
    table.add_row("kept", str(report.num_kept))
    for label, number in labels.most_common():
        table.add_row(f"  {label}", str(number))
    table.add_row("left out", str(report.num_left_out))
    for (reason, kept), number in report.count_by_reason().items():
        table.add_row(f"  {reason}{' (kept)' if kept else ''}", str(number))
    return table


if __name__ == "__main__":
    main()
