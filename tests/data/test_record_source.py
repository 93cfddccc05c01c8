import json
import logging
import shutil
import threading
from pathlib import Path

import pytest
from PIL import Image

from clips import make_clip
from data.record_rows import media, row, video
from reframe_vl.data import record_table
from reframe_vl.data.evidence import EVIDENCE_VERSION
from reframe_vl.data.media import MediaError
from reframe_vl.data.record_source import Choice, RecordSource
from reframe_vl.data.report import RecordError


@pytest.fixture
def written(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    make_clip(tmp_path / "a.mp4")

    def write(*rows):
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / "r.jsonl"

    return write


UNUSABLE = [
    ({"question": ""}, "bad_record", "line 2: question"),
    (media("gone.png"), "media_missing", r"record odd: media\.path: .*gone\.png.*Check the media"),
    (media("bad.png"), "media_unreadable", r"media\.path: .*bad\.png.*fetch it again"),
    (media(width=200, height=160), "size_mismatch", r"media\.width.*200x160.*100x80"),
    ({"boxes": [{"xyxy": [10, 20, 30, 90]}]}, "box_leaves_image", r"boxes\.0\.xyxy.*clip it"),
    ({"boxes": [{"xyxy": [0.1, 0.2, 0.3, 0.4]}]}, "wrong_scale", r"boxes\.0\.xyxy.*Multiply"),
    ({"modality": "video", "boxes": []}, "grid_missing", r"media\.grid.*video_record"),
    (video("bad.png"), "media_unreadable", r"media\.path: .*bad\.png.*leave its rows out"),
    (video("gone.mp4"), "media_missing", r"media\.path: .*gone\.mp4.*Check the media"),
    (video("a.mp4", [[1.0, 3.0], [2.5, 3.0]]), "segment_outside", r"segments\.1: .*Correct it"),
    (video("a.mp4", frames=[3, 4]), "evidence_off_grid", r"evidence\.segments\.0: .*has 4"),
    (
        {"evidence": {"version": EVIDENCE_VERSION, "segments": [[0, 1]]}},
        "evidence_off_grid",
        r"evidence\.segments: .*an image is its boxes",
    ),
    ({"evidence": None}, "evidence_missing", r"evidence: .*build_data"),
    ({"evidence": {"version": "0"}}, "evidence_version", r"evidence\.version: .*build_data"),
]


@pytest.mark.parametrize(("changes", "reason", "words"), UNUSABLE)
def test_a_record_that_cannot_be_used_stops_or_is_left_out_and_counted(
    written, caplog, changes, reason, words
):
    path = written(row("one"), row("odd", **changes), row("two"))
    with pytest.raises(RecordError, match=rf"r\.jsonl, .*{words}"):
        RecordSource(path)
    with caplog.at_level(logging.WARNING):
        source = RecordSource(path, on_error="skip")
    assert [source[i].id for i in range(len(source))] == ["one", "two"]
    assert source.report.count_by_reason() == {(reason, False): 1}
    assert (source.report.num_kept, source.report.num_left_out) == (2, 1)
    (line,) = (r.message for r in caplog.records)
    assert f"left out ({reason}): 1;" in line


def test_records_of_images_and_videos_stand_in_one_file(written):
    source = RecordSource(written(row("image"), row("video", **video("a.mp4"))))
    assert [source[i].domain for i in range(len(source))] == ["image", "video"]
    assert len(source[1].media.look(range(4), 10**6)) == 4


def test_skipped_records_are_warned_about_in_one_line_a_reason(written, caplog):
    odd = [row(f"gone{i}", **media(f"{i}.png")) for i in range(5)]
    two_boxes = [{"xyxy": [10, 20, 30, 90]}, {"xyxy": [10, 20, 30, 91]}]
    path = written(row("one"), *odd, row("wide", boxes=two_boxes))
    with caplog.at_level(logging.WARNING):
        source = RecordSource(path, on_error="skip")
    assert source.report.count_by_reason() == {
        ("media_missing", False): 5,
        ("box_leaves_image", False): 1,
    }
    first, second = (r.message for r in caplog.records)
    assert ": 5;" in first and "0.png" in first
    assert ": 1;" in second and "wide" in second


def test_a_limit_draws_evenly_from_the_whole_file(written):
    rows = [row(f"{n}", source=f"s{n // 10}") for n in range(30)]
    source = RecordSource(written(*rows), limit=6)
    assert ids(source) == ["0", "5", "10", "15", "20", "25"]
    rows[10] = row("10", **media("gone.png"))
    source = RecordSource(written(*rows), limit=6, on_error="skip")
    assert len(source) == 6 and set(source.labels("source")) == {"s0", "s1", "s2"}
    assert len(RecordSource(written(*rows), limit=29, on_error="skip")) == 29


def test_the_limit_counts_usable_records(written):
    path = written(row("gone", **media("gone.png")), row("one"), row("two"), row("three"))
    source = RecordSource(path, limit=2, on_error="skip")
    assert [source[i].id for i in range(len(source))] == ["one", "two"]


def test_a_file_without_usable_records_names_the_first_problem(written):
    path = written(row("gone", **media("gone.png")))
    with pytest.raises(ValueError, match=r"no usable record.*gone\.png"):
        RecordSource(path, on_error="skip")


def test_where_no_sample_is_left_the_reason_is_the_samples_own(written):
    source = RecordSource(written(row("one")))
    with pytest.raises(
        ValueError, match=r"the first: .*r\.jsonl, line 1, record one: it is too long"
    ):
        source.leave_out(lambda sample: "it is too long")


def ids(source):
    return [source[i].id for i in range(len(source))]


# --------------------------------------------------------------------------- opened again


def test_what_was_read_and_checked_once_is_not_again(written, monkeypatch, tmp_path):
    path = written(row("one"), row("odd", **media("gone.png")), row("bad", question=""), row("two"))
    first = RecordSource(path, on_error="skip")
    monkeypatch.setattr(record_table, "parsed_lines", None)
    (tmp_path / "a.png").unlink()
    again = RecordSource(path, on_error="skip")
    assert ids(again) == ids(first) == ["one", "two"]
    assert again.report == first.report
    with pytest.raises(MediaError, match="no such file"):
        again[0].media.look(None, 100)


def test_a_record_file_that_changed_is_read_anew(written):
    assert ids(RecordSource(written(row("one")))) == ["one"]
    assert ids(RecordSource(written(row("two"), row("one")))) == ["two", "one"]


def test_media_that_were_not_there_are_looked_for_again(written, tmp_path):
    path = written(row("one"), row("later", **media("b.png")))
    assert ids(RecordSource(path, on_error="skip")) == ["one"]
    Image.new("RGB", (100, 80)).save(tmp_path / "b.png")
    assert ids(RecordSource(path)) == ["one", "later"]


@pytest.mark.parametrize("name", ["records.arrow", "checked", "sum"])
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_damaged_table_is_made_anew(written, name, keep):
    path = written(row("one"), row("two"))
    RecordSource(path)
    file = path.with_name(f".{path.name}.cache") / name
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    assert ids(RecordSource(path)) == ["one", "two"]


def test_a_flipped_bit_anywhere_in_the_table_is_said_and_the_table_made_anew(written, caplog):
    path = written(row("one"), row("two"))
    RecordSource(path)
    file = path.with_name(f".{path.name}.cache") / "records.arrow"
    whole = file.read_bytes()
    for place in range(7, len(whole), len(whole) // 25):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        caplog.clear()
        assert ids(RecordSource(path)) == ["one", "two"]
        assert f"{file} is damaged: it is made anew from the record file" in caplog.text
        assert file.read_bytes() == whole


def test_where_the_folder_cannot_be_written_the_table_is_in_the_users_cache(
    written, tmp_path, monkeypatch
):
    path = written(row("one"))
    monkeypatch.setattr(record_table.os, "access", lambda folder, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert ids(RecordSource(path)) == ["one"]
    assert not path.with_name(f".{path.name}.cache").exists()
    assert [p.name for p in (tmp_path / "home").glob("reframe_vl/*/records.arrow")]


def test_where_nothing_can_be_kept_a_sentence_names_the_variable(written, tmp_path, monkeypatch):
    path = written(row("one"))
    monkeypatch.setattr(record_table.os, "access", lambda folder, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a.png"))
    with pytest.raises(OSError, match=r"r\.jsonl: .*Set the environment variable XDG_CACHE_HOME"):
        RecordSource(path)


def test_of_ranks_that_open_a_file_at_once_one_reads_it(written, monkeypatch):
    path = written(*(row(f"{i}") for i in range(50)))
    read, lines = [], record_table.parsed_lines
    monkeypatch.setattr(record_table, "parsed_lines", lambda file: read.append(file) or lines(file))
    sources = []
    threads = [threading.Thread(target=lambda: sources.append(RecordSource(path))) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(source) for source in sources] == [50] * 3 and read == [path]


def test_an_image_that_was_replaced_by_another_is_noticed_when_it_is_looked_at(written, tmp_path):
    source = RecordSource(written(row("one")))
    Image.new("RGB", (80, 100)).save(tmp_path / "a.png")
    sample = source[0]
    assert sample.media.size == (100, 80)
    with pytest.raises(
        MediaError, match=r"80x100 pixels, its record says \(100, 80\).*another file"
    ):
        sample.media.look(None, 100)


def test_a07_what_rows_do_not_have_does_not_come_back_as_null(written):
    odd = row("two", raw={"b": 1}, options=["x", "y"], answer={"kind": "mcq", "value": "A"})
    source = RecordSource(written(row("one", raw={"a": {"c": 1}}), odd, row("v", **video("a.mp4"))))
    first, second, third = (source[i] for i in range(3))
    assert first.options == () and second.options == ("x", "y") and third.evidence.boxes == ()


# --------------------------------------------------------------------------- which records


@pytest.fixture
def mixed(written, tmp_path):
    """20 media of 3 records each, of two sources; every fourth medium is a video."""
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    rows = []
    for number in range(20):
        for which in range(3):
            name = f"{number}/{which}"
            origin = {"source": "ab"[which % 2]}
            if number % 4 == 3:
                shutil.copy(tmp_path / "a.mp4", tmp_path / f"{number}.mp4")
                rows.append(row(name, **video(f"{number}.mp4"), **origin))
                continue
            Image.new("RGB", (100, 80)).save(tmp_path / f"{number}.png")
            label = {"applicability": ("beneficial", "neutral", None)[which]}
            rows.append(row(name, **media(f"./{number}.png"), **origin, **label))
    return written(*rows)


def of(path, **settings):
    return RecordSource(path, choice=Choice(**settings))


def test_records_are_chosen_by_modality_source_and_applicability(mixed):
    assert len(of(mixed)) == 60
    videos = of(mixed, only={"modality": ("video",)})
    assert {sample.modality for sample in map(videos.__getitem__, range(15))} == {"video"}
    assert len(of(mixed, only={"source": ("b",)})) == 20
    chosen = of(
        mixed, only={"source": ("a",), "applicability": ("unknown",), "modality": ("image",)}
    )
    assert ids(chosen) == [f"{n}/2" for n in range(20) if n % 4 != 3]
    assert set(chosen.labels("source")) == {"a"} and set(chosen.labels("modality")) == {"image"}


def test_media_of_records_that_are_not_chosen_are_not_opened(mixed, tmp_path):
    (tmp_path / "3.mp4").unlink()
    assert len(of(mixed, only={"modality": ("image",)})) == 45
    with pytest.raises(RecordError, match=r"line 10, record 3/0.*no such file"):
        of(mixed)


def test_a_name_that_no_record_has_is_refused_with_those_there_are(mixed):
    with pytest.raises(ValueError, match="has the source c; there is a, b"):
        of(mixed, only={"source": ("a", "c")})


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_media_file_is_in_one_part_with_all_its_records(mixed, share):
    train = of(mixed, part="train", validation_share=share)
    held = of(mixed, part="validation", validation_share=share)
    assert sorted(ids(train) + ids(held)) == sorted(ids(of(mixed)))
    files = [{source[i].media.path.name for i in range(len(source))} for source in (train, held)]
    assert not files[0] & files[1] and len(files[1]) == 20 * share
    images = of(mixed, part="validation", validation_share=share, only={"modality": ("image",)})
    assert set(ids(images)) == {id_ for id_ in ids(held) if int(id_.split("/")[0]) % 4 != 3}


def test_a_line_that_cannot_be_read_stops_the_training_whatever_is_chosen(mixed):
    with mixed.open("a") as stream:
        stream.write("\n{}\n")
    with pytest.raises(RecordError, match=r"line 61: .*Field required"):
        of(mixed, validation_share=0.25, only={"modality": ("image",)})


def test_the_parts_stay_when_the_folder_moves(mixed, tmp_path):
    before = ids(of(mixed, part="validation", validation_share=0.25))
    moved = tmp_path.rename(tmp_path.with_name("moved")) / mixed.name
    assert ids(of(moved, part="validation", validation_share=0.25)) == before
    Path(moved.parent).rename(tmp_path)


@pytest.mark.parametrize(
    ("share", "words"), [(1.0, "below 1"), (-0.1, "above 0"), (0.99, "too few")]
)
def test_shares_that_leave_nothing_are_refused(mixed, share, words):
    with pytest.raises(ValueError, match=words):
        of(mixed, validation_share=share)


# --------------------------------------------------------------------------- what does not fit


def test_b24_each_sample_that_does_not_fit_is_named(mixed, caplog):
    source = of(mixed)
    with caplog.at_level(logging.DEBUG):
        source.leave_out(lambda sample: "it is too long" if sample.id.endswith("/1") else None)
    assert len(source) == 40 and not any(name.endswith("/1") for name in ids(source))
    (warning,) = (r.message for r in caplog.records if r.levelname == "WARNING")
    assert "20 of 60 samples are left out" in warning
    assert "line 2, record 0/1: it is too long" in warning and "record 9/1" in warning
    everyone = [r.message for r in caplog.records if r.message.startswith("Left out")]
    assert len(everyone) == 20 and "record 19/1" in everyone[-1]


# --------------------------------------------------------------------------- what media are one


def test_a_media_file_is_one_however_its_path_is_spelled(written, tmp_path):
    (tmp_path / "deep").mkdir()
    for link in ("linked.png", "deep/linked.png"):
        (tmp_path / link).symlink_to(tmp_path / "a.png")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    spellings = (
        "a.png",
        "./a.png",
        "deep/../a.png",
        "again/a.png",
        "linked.png",
        "deep/linked.png",
        f"../{tmp_path.name}/a.png",
        str(tmp_path / "a.png"),
        str(tmp_path / "again" / "deep" / ".." / "a.png"),
    )
    rows = [row(f"a{n}", **media(path)) for n, path in enumerate(spellings)]
    path = written(*rows, row("b", **media("b.png")))
    for opened in (path, tmp_path / "again" / path.name):
        parts = [of(opened, part=p, validation_share=0.5) for p in ("train", "validation")]
        assert sorted(len(part) for part in parts) == [1, len(spellings)]


def test_names_that_no_file_can_have_are_left_out_like_any_missing_one(written):
    path = written(row("one"), row("odd", **media("a\0.png")), row("long", **media("a" * 5000)))
    assert ids(RecordSource(path, on_error="skip")) == ["one"]


# --------------------------------------------------------------------------- evidence


@pytest.mark.parametrize("stated", [media(), {"media": {"path": "a.png"}}])
@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ([5, 15, 35, 81], "box_leaves_image"),
        ([-1, 15, 35, 45], "box_leaves_image"),
        ([105, 15, 135, 45], "wrong_scale"),
        ([0.05, 0.15, 0.35, 0.45], "wrong_scale"),
    ],
)
def test_a14_evidence_lies_in_the_upright_image_whether_its_size_is_stated_or_read(
    written, stated, box, reason
):
    evidence = {"evidence": {"version": EVIDENCE_VERSION, "boxes": [[5, 15, 35, 45], box]}}
    path = written(row("one"), row("odd", **stated, **evidence))
    with pytest.raises(RecordError, match=r"record odd: evidence\.boxes\.1: .*does not fit"):
        RecordSource(path)
    source = RecordSource(path, on_error="skip")
    assert source.report.count_by_reason() == {(reason, False): 1}


def test_the_boxes_of_a_record_without_a_size_are_held_against_the_upright_file(written, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (100, 80)).save(tmp_path / "turned.jpg", exif=exif)
    evidence = {"evidence": {"version": EVIDENCE_VERSION, "boxes": [[0, 75, 60, 100]]}}
    boxes = {"boxes": [{"xyxy": [10, 80, 50, 95]}], **evidence}
    tall = row("tall", media={"path": "turned.jpg"}, **boxes)
    wide = row("wide", media={"path": "turned.jpg"}, boxes=[{"xyxy": [10, 20, 90, 40]}])
    source = RecordSource(written(tall, wide), on_error="skip")
    assert ids(source) == ["tall"]
    assert source.report.count_by_reason() == {("box_leaves_image", False): 1}


def test_a_video_has_no_boxes_as_evidence(written):
    fields = video("a.mp4")
    fields["evidence"] = {**fields["evidence"], "boxes": [[5, 15, 35, 45]]}
    path = written(row("one"), row("odd", **fields))
    with pytest.raises(RecordError, match=r"evidence\.boxes: the evidence of a video"):
        RecordSource(path)
