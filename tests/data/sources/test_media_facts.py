import os
from pathlib import Path

import pytest
from PIL import Image

from reframe_vl.data.formats import media_folder
from reframe_vl.data.formats.media_facts import MediaFacts
from reframe_vl.data.formats.media_folder import MediaFolder
from reframe_vl.data.record_parts import MediaInfo
from reframe_vl.data.video import GridRule
from reframe_vl.types import Modality


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    read = media_folder._read

    def noted(path: Path, modality: Modality, rule: GridRule) -> MediaInfo:
        found.append(path)
        return read(path, modality, rule)

    monkeypatch.setattr(media_folder, "_read", noted)
    return found


def size(folder: Path) -> tuple[int, int] | None:
    facts = MediaFacts(folder / "work" / "media.jsonl")
    return MediaFolder(folder, GridRule(), facts).image_size("a.png")


def test_media_are_read_once_for_all_runs_and_anew_when_they_change(tmp_path, opened) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    assert size(tmp_path) == size(tmp_path) == (30, 20) and len(opened) == 1
    Image.new("RGB", (300, 200)).save(tmp_path / "a.png")
    os.utime(tmp_path / "a.png", (1, 1))
    assert size(tmp_path) == (300, 200) and len(opened) == 2


def test_a_line_that_was_cut_off_harms_nothing(tmp_path, opened) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    assert size(tmp_path) == (30, 20)
    file = tmp_path / "work" / "media.jsonl"
    file.write_bytes(file.read_bytes().rstrip()[:-5])
    assert size(tmp_path) == size(tmp_path) == (30, 20) and len(opened) == 2


def test_a_grid_of_another_rule_is_not_taken(tmp_path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"a video")
    facts = MediaFacts(tmp_path / "media.jsonl")
    facts.put(tmp_path / "a.mp4", Modality.VIDEO, GridRule(2, 8), MediaInfo(path="a.mp4"))
    again = MediaFacts(tmp_path / "media.jsonl")
    assert again.get(tmp_path / "a.mp4", Modality.VIDEO, GridRule(2, 8)) is not None
    assert again.get(tmp_path / "a.mp4", Modality.VIDEO, GridRule(1, 8)) is None
