"""The embedded worlds go through the schema of records, and through the same data module."""

import pytest

from reframe_vl.data.datamodule import SampleDataModule
from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.record_parts import AnswerInfo, ExpandedEvidence, MediaInfo
from reframe_vl.data.records import Record, read_records, write_records
from reframe_vl.data.video import GridRule
from reframe_vl.mini.source import mini_image_data, mini_mixed_data, mini_video_data
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.world import MiniWorld
from reframe_vl.types import Modality


def as_record(sample) -> Record:
    """A world's sample as a record; its media are drawn, so that it names no file that is there."""
    width, height = sample.media.size
    media = {"path": f"{sample.id}.png", "width": width, "height": height}
    if sample.modality is Modality.VIDEO:
        times = sample.media.timestamps_s
        media |= {"duration_s": float(len(times)), "n_frames": len(times), "timestamps_s": times}
        media |= {"grid": GridRule(1.0, len(times))}
    return Record(
        id=sample.id,
        source=sample.source,
        split=sample.split,
        licence="none",
        raw={},
        modality=sample.modality,
        media=MediaInfo(**media),
        question=sample.question,
        options=sample.options,
        answer=AnswerInfo(
            kind=sample.answer.kind,
            value=sample.answer.value,
            aliases=sample.answer.aliases,
            tolerance=sample.answer.tolerance,
        ),
        evidence=ExpandedEvidence(
            version=EVIDENCE_VERSION,
            boxes=sample.evidence.boxes,
            segments=sample.evidence.segments,
        ),
        applicability=sample.applicability,
    )


@pytest.mark.parametrize("world", [MiniWorld(), MiniVideoWorld()], ids=["image", "video"])
def test_samples_of_the_worlds_come_back_from_a_record_file(tmp_path, world) -> None:
    samples = [world.sample("train", index) for index in range(8)]
    write_records(tmp_path / "mini.jsonl", map(as_record, samples))
    for sample, record in zip(samples, read_records(tmp_path / "mini.jsonl"), strict=True):
        back = record.to_sample(tmp_path)
        for name in ("id", "modality", "question", "options", "answer", "evidence", "domain"):
            assert getattr(back, name) == getattr(sample, name)
        assert (back.applicability, back.source) == (sample.applicability, sample.source)
        assert back.media.size == sample.media.size


def test_the_worlds_are_served_by_the_data_module_of_record_files() -> None:
    data = [
        mini_image_data(0.5, 1, 0.8, 4, 0),
        mini_video_data(0.5, 3, 1, 2, 0.8, 4, 0),
        mini_mixed_data(0.5, 4, 0),
    ]
    assert all(type(module) is SampleDataModule for module in data)
