import os
from pathlib import Path

import pytest

from clips import make_clip
from data.sources.source_files import CHARADES_LINE, read, reasons
from reframe_vl.data.formats.media_search import MediaSearch
from reframe_vl.data.formats.rows import Refused
from reframe_vl.types import Modality


def put(folder: Path, *names: str) -> MediaSearch:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"-")
    return MediaSearch(folder)


def found(
    search: MediaSearch, name: str, modality: Modality = Modality.IMAGE
) -> tuple[str, str | None]:
    """The path below the folder, or the reason why there is none; and the reason of the note."""
    try:
        path, notes = search.find(name, modality)
    except Refused as refused:
        return "", refused.reason
    (reason,) = [note.reason for note in notes] or [None]
    return str(path.relative_to(search.folder.absolute())), reason


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["B/1.png", "A/2.png"], ("", "media_missing")),
        (["B/rgb/1.png", "A/2.png"], ("", "media_missing")),
        (["B/1.png"], ("B/1.png", "media_elsewhere")),
        (["B/1.png", "C/1.png"], ("", "media_ambiguous")),
        (["set/A/1.png", "set/B/1.png"], ("set/A/1.png", None)),
        (["1.png"], ("1.png", None)),
    ],
)
def test_a_file_of_another_folder_than_the_row_names_is_never_taken_silently(
    tmp_path, files, expected
) -> None:
    assert found(put(tmp_path, *files), "A/1.png") == expected


def test_of_files_in_folders_of_the_same_name_the_one_of_the_rows_outer_folder_counts(
    tmp_path,
) -> None:
    search = put(tmp_path, "up/A/rgb/1.png", "up/B/rgb/1.png", "up/B/rgb/2.png")
    assert found(search, "A/rgb/1.png") == ("up/A/rgb/1.png", None)
    assert found(search, "/home/someone/A/rgb/1.png") == ("up/A/rgb/1.png", "media_elsewhere")
    assert found(search, "A/rgb/2.png") == ("", "media_missing")


def test_a_path_of_this_machine_inside_the_folder_is_that_file(tmp_path, monkeypatch) -> None:
    put(tmp_path / "media", "A/1.png", "B/1.png")
    (tmp_path / "link").symlink_to(tmp_path / "media")
    monkeypatch.chdir(tmp_path)
    for folder in ("media", "link"):
        name = str(tmp_path / "media" / "B" / "1.png")
        assert found(MediaSearch(Path(folder)), name) == ("B/1.png", None)


@pytest.mark.parametrize(
    ("file", "name", "modality", "reason"),
    [
        ("V.mp4", "V.MKV", Modality.VIDEO, None),
        ("V.mp4", "V.MP4.mp4", Modality.VIDEO, None),
        ("V.MP4", "V.mp4", Modality.VIDEO, None),
        ("a.jpg", "a", Modality.IMAGE, None),
        ("a.JPEG", "a.jpg", Modality.IMAGE, None),
        ("a.png", "a.jpg", Modality.IMAGE, "media_other_suffix"),
        ("b.v1.png", "b.v1", Modality.IMAGE, None),
    ],
)
def test_a_file_may_have_another_suffix_than_named_and_images_of_another_kind_are_noted(
    tmp_path, file, name, modality, reason
) -> None:
    assert found(put(tmp_path, f"deep/{file}"), name, modality) == (f"deep/{file}", reason)


def test_a_mask_is_not_taken_for_an_image_that_is_there(tmp_path) -> None:
    search = put(tmp_path, "images/a.JPG", "masks/a.png", "texts/b.txt")
    assert found(search, "a.jpg") == ("images/a.JPG", None)
    assert found(search, "b.jpg") == ("", "media_missing")


def test_linked_folders_are_searched_once_and_loops_of_links_end(tmp_path) -> None:
    search = put(tmp_path / "media", "here/a.png")
    put(tmp_path / "far", "deep/b.png")
    (tmp_path / "media" / "0").symlink_to(tmp_path / "media" / "here")
    (tmp_path / "media" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "loop").symlink_to(tmp_path / "media")
    assert found(search, "a.png") == ("here/a.png", None)
    assert found(search, "b.png") == ("far/deep/b.png", None)


def test_only_regular_files_are_media(tmp_path) -> None:
    search = put(tmp_path, "deep/c.txt")
    os.mkfifo(tmp_path / "deep" / "a.png")
    (tmp_path / "deep" / "b.png").mkdir()
    assert found(search, "a.png") == found(search, "b.png") == ("", "media_missing")


def test_a_path_that_is_not_of_utf8_is_refused_in_words(tmp_path) -> None:
    search = put(tmp_path, "\udcff/a.png")
    with pytest.raises(Refused, match=r"\\xff.*Rename") as caught:
        search.find("a.png", Modality.IMAGE)
    assert caught.value.reason == "bad_name"


@pytest.mark.parametrize(
    ("end", "reason", "kept"),
    [("1.5", None, True), ("3.5", "segment_beyond_end", True), ("7", "segment_outside", False)],
)
def test_windows_are_held_against_the_real_end_where_no_duration_is_listed(
    tmp_path, end, reason, kept
) -> None:
    (tmp_path / "media").mkdir()
    make_clip(tmp_path / "media" / "AB12C.mp4", n=20)
    line = CHARADES_LINE.replace("1.5 7.25", f"0.5 {end}")
    rows = {"charades_sta_test.txt": line}
    records, report = read(tmp_path / "in", "charades_sta", rows, tmp_path / "media")
    assert len(records) == kept
    assert reasons(report) == ({} if reason is None else {reason: kept})
