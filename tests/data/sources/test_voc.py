import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.sources.source_files import VOC, read, reasons
from reframe_vl.data.formats.boxes import from_inclusive
from reframe_vl.data.sources import SOURCES
from reframe_vl.data.stages.finalise import expand_evidence


@given(st.tuples(*[st.integers(1, 5000)] * 4))
def test_inclusive_pixels_from_1_come_back(corners) -> None:
    x0, y0, x1, y1 = from_inclusive(*corners)
    assert (x0 + 1, y0 + 1, x1, y1) == corners


def one(tmp_path, old="", new="", **settings):
    assert old in VOC
    return read(tmp_path, "voc", {"a.xml": VOC.replace(old, new, 1)}, **settings)


def test_pixels_from_1_with_the_last_become_half_open_from_0(tmp_path) -> None:
    (dogs, cats), report = one(tmp_path)
    assert dogs.boxes[0].xyxy == (10, 20, 30, 40)
    assert cats.boxes[0].xyxy == (0, 0, 100, 80)  # The whole image.
    assert reasons(report) == {"difficult": True}


def test_objects_marked_difficult_may_be_counted_or_not(tmp_path) -> None:
    (dogs, cats), _ = one(tmp_path)
    assert (dogs.answer.value, dogs.answer.aliases) == ("2", ("1",))
    assert (cats.answer.value, cats.answer.aliases) == ("1", ())


def test_the_file_comes_back_as_it_was(tmp_path) -> None:
    text = '\ufeff<?xml version="1.0" encoding="latin-1"?>\r\n' + VOC.replace("dog", "dög")
    records, _ = read(tmp_path, "voc", {"a.xml": text})
    source = SOURCES["voc"](tmp_path)
    assert {source.native(record) for record in records} == {text}
    assert records[0].boxes[0].label == "dög"


def test_parts_of_an_object_are_not_counted(tmp_path) -> None:
    part = "<part><name>head</name><bndbox><xmin>11</xmin></bndbox></part></object>"
    (dogs, _), _ = one(tmp_path, "</object>", part)
    assert len(dogs.boxes) == 2 and dogs.boxes[0].xyxy == (10, 20, 30, 40)


def test_a_box_that_counts_from_0_is_clipped_by_a_pixel(tmp_path) -> None:
    (dogs, _), report = one(tmp_path, "<xmin>11", "<xmin>0")
    assert dogs.boxes[0].xyxy == (0, 20, 30, 40) and reasons(report)["box_clipped"] is True


@pytest.mark.parametrize("size", ["<size><width>0</width><height>0</height></size>", ""])
def test_a_size_of_0_is_unknown_until_the_image_is_read(tmp_path, size) -> None:
    whole = "<size><width>100</width><height>80</height><depth>3</depth></size>"
    (dogs, _), report = one(tmp_path, whole, size)
    assert dogs.media.size is None and expand_evidence(dogs).evidence is None
    assert reasons(report)["size_unknown"] is True
    Image.new("RGB", (100, 80)).save(tmp_path / "a.jpg")
    (dogs, _), _ = one(tmp_path, whole, size, media=tmp_path)
    assert dogs.media.size == (100, 80) and expand_evidence(dogs).evidence is not None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("<xmin>11", "<xmin>31", "bad_row"),
        ("<xmin>11", "<xmin>left", "bad_row"),
        ("<xmin>11</xmin>", "", "bad_row"),
        ("<xmax>30", "<xmax>130", "box_leaves_image"),
        ("<name>dog", "<name>", "no_label"),
        ("<filename>a.jpg", "<filename>", "media_missing"),
        ("<annotation>", "<annotation", "bad_xml"),
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>', "bad_xml"),
        (VOC, "<annotation/>", "no_object"),
        ("<bndbox>", "<bndbox><xmin>1</xmin></bndbox><bndbox>", "repeated_key"),
        ("<xmin>11", "<xmin>9</xmin><xmin>11", "repeated_key"),
        ("<filename>", "<filename>b.jpg</filename><filename>", "repeated_key"),
    ],
)
def test_a14_odd_files_and_objects_are_named(tmp_path, old, new, reason) -> None:
    _, report = one(tmp_path, old, new)
    assert reasons(report)[reason] is False


@pytest.mark.parametrize(
    ("encoding", "stated"),
    [
        ("utf-8-sig", "utf-8"),
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16"),
        ("utf-16-be", None),
        ("utf-16", None),
        ("latin-1", "ISO-8859-1"),
        ("gb2312", "gb2312"),
        ("utf-8", "UTF-16"),
        ("utf-8", "klingon"),
    ],
)
def test_files_in_other_encodings_are_read_as_those_in_utf8(tmp_path, encoding, stated) -> None:
    label = "犬" if encoding == "gb2312" else "dög"
    head = "" if stated is None else f'<?xml version="1.0" encoding="{stated}"?>\n'
    text = head + VOC.replace("dog", label)
    records, report = read(tmp_path, "voc", {"a.xml": text.encode(encoding)})
    assert [record.boxes[0].label for record in records] == [label, "cat"]
    assert report.num_left_out == 0
    assert SOURCES["voc"](tmp_path).native(records[0]).removeprefix("\ufeff") == text


@pytest.mark.parametrize("stated", ["", ' encoding="klingon"', ' encoding="hex"'])
def test_a_file_in_no_known_encoding_is_named(tmp_path, stated) -> None:
    text = f'<?xml version="1.0"{stated}?>{VOC}'.replace("dog", "dög")
    records, report = read(tmp_path, "voc", {"a.xml": text.encode("latin-1")})
    assert not records and reasons(report) == {"bad_xml": False}
    (problem,) = report.problems
    assert problem.where.endswith("a.xml") and "write it in UTF-8" in problem.message
