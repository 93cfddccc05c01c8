import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sources.source_files import COCO, read, reasons
from reframe_vl.data.formats.boxes import from_corner_and_size

PIXELS = st.floats(0, 5000).map(lambda n: round(n, 2))


@given(PIXELS, PIXELS, PIXELS, PIXELS)
def test_corners_give_the_width_and_height_back(x, y, width, height) -> None:
    x0, y0, x1, y1 = from_corner_and_size(x, y, width, height)
    assert [x0, y0] == [x, y]
    assert [round(x1 - x0, 2), round(y1 - y0, 2)] == [width, height]


def changed(part, number=0, **changes):
    value = copy.deepcopy(COCO)
    value[part][number].update(changes)
    return {"instances_val2017.json": value}


def test_each_kind_is_counted_with_a_box_an_object(tmp_path) -> None:
    (dogs, cats), report = read(tmp_path, "coco", changed("images"))
    assert dogs.question == 'How many objects of the kind "dog" are in the image?'
    assert (dogs.answer.kind, dogs.answer.value) == ("number", "2")
    assert dogs.boxes[0].xyxy == pytest.approx((10.1, 20, 15.3, 28))
    assert dogs.boxes[1].xyxy == (50, 20, 80, 60)
    assert {box.label for box in dogs.boxes} == {"dog"}
    assert (cats.answer.value, cats.split, report.problems) == ("1", "val", [])


def test_every_annotation_comes_back_from_the_records(tmp_path) -> None:
    records, _ = read(tmp_path, "coco", changed("images"))
    raw = [annotation for record in records for annotation in record.raw["annotations"]]
    assert sorted(raw, key=lambda annotation: annotation["id"]) == COCO["annotations"]


@pytest.mark.parametrize(
    ("files", "reason", "count"),
    [
        (changed("annotations", iscrowd=1, segmentation={"counts": [1, 2], "size": [80, 100]}),
         "crowd", 1),
        (changed("annotations", bbox=[10, 20, 0, 8]), "bad_row", 1),
        (changed("annotations", bbox=[10, 20, 5]), "bad_row", 1),
        (changed("annotations", bbox=[60, 20, 60, 40]), "box_leaves_image", 1),
        (changed("annotations", bbox=[300, 20, 60, 40]), "wrong_scale", 1),
        (changed("annotations", image_id=9), "unknown_id", 2),
        (changed("annotations", category_id=None), "unknown_id", 2),
        (changed("images", width=0), "bad_row", 0),
        (changed("images", id=[1]), "bad_row", 0),
        (changed("categories", name=" "), "no_label", 1),
    ],
)  # fmt: skip
def test_a16_odd_entries_are_named_and_the_others_read(tmp_path, files, reason, count) -> None:
    records, report = read(tmp_path, "coco", files)
    assert len(records) == count
    assert reasons(report)[reason] is False


def test_an_image_without_objects_is_reported(tmp_path) -> None:
    value = copy.deepcopy(COCO)
    value["images"].append({"id": 2, "file_name": "b.jpg", "width": 9, "height": 9})
    records, report = read(tmp_path, "coco", {"a.json": value})
    assert len(records) == 2 and reasons(report) == {"no_object": False}


@pytest.mark.parametrize(
    ("extra", "count", "found"),
    [
        ({}, "2", {"duplicate_row": False}),
        ({"bbox": [1, 1, 5, 5]}, "3", {"repeated_id": True}),
        ({"id": 99}, "3", {"repeated_box": True}),
    ],
)
def test_repeated_annotations_are_not_counted_twice_unseen(tmp_path, extra, count, found) -> None:
    value = copy.deepcopy(COCO)
    value["annotations"].append({**COCO["annotations"][0], **extra})
    (dogs, _), report = read(tmp_path, "coco", {"a.json": value})
    assert dogs.answer.value == count and reasons(report) == found


def test_sums_of_floats_that_pass_the_edge_are_no_oddity(tmp_path) -> None:
    files = changed("annotations", bbox=[99.7, 20, 0.3 + 1e-12, 40])
    (dogs, _), report = read(tmp_path, "coco", files)
    assert dogs.boxes[0].xyxy[2] == 100 and "box_clipped" not in reasons(report)


def test_annotations_may_stand_before_their_images(tmp_path) -> None:
    turned = dict(reversed(COCO.items()))
    records, report = read(tmp_path, "coco", {"a.json": turned})
    assert len(records) == 2 and report.problems == []


def test_ids_as_tables_write_them_are_read_and_true_is_not_1(tmp_path) -> None:
    file = copy.deepcopy(COCO)
    for annotation in file["annotations"]:
        annotation |= {"image_id": float(annotation["image_id"]), "iscrowd": False}
    records, report = read(tmp_path, "coco", {"instances_val2017.json": file})
    assert len(records) == 2 and report.problems == []
    file["annotations"][0]["image_id"] = True
    records, report = read(tmp_path, "coco", {"instances_val2017.json": file})
    assert reasons(report) == {"unknown_id": False}


def test_an_image_without_a_file_name_is_the_last_part_of_its_address(tmp_path) -> None:
    files = changed("images", coco_url="http://images.cocodataset.org/val2017/a%20b.jpg?x=1")
    del files["instances_val2017.json"]["images"][0]["file_name"]
    records, report = read(tmp_path, "coco", files)
    assert {record.media.path for record in records} == {"a b.jpg"} and report.problems == []
    assert "file_name" not in records[0].raw["image"]
