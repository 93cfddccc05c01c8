import copy

import pytest

from data.sources.source_files import COCO, VISDRONE, read, reasons


def test_lines_become_one_record_a_kind_and_sizes_are_unknown(tmp_path) -> None:
    (cars, walkers), report = read(tmp_path, "visdrone", {"0001.txt": VISDRONE})
    assert (cars.answer.value, walkers.answer.value) == ("2", "1")
    assert cars.boxes[0].xyxy == (10, 20, 15, 28) and cars.boxes[0].label == "car"
    assert (cars.media.path, cars.media.size) == ("0001.jpg", None)
    assert "width, height" in cars.audit[-1].note and report.problems == []


@pytest.mark.parametrize(
    "line", ["1,2,3,4,0,0,0,0", "1,2,3,4,1,11,0,0", "1,2,3,4,0,4,0,0", "1,2,3,4,1,0,0,0"]
)
def test_what_an_evaluation_ignores_is_left_out_with_its_line(tmp_path, line) -> None:
    text = f"{line}\r\n{VISDRONE}"
    records, report = read(tmp_path, "visdrone", {"0001.txt": text})
    assert len(records) == 2 and reasons(report) == {"ignored": False}
    assert "0001.txt, line 1" in report.problems[0].where


@pytest.mark.parametrize("line", ["1,2,3,4,1,4,0", "1,2,3,4,1,12,0,0", "a b c", "1,2,3,4,1,x,0,0"])
def test_lines_of_another_format_are_refused(tmp_path, line) -> None:
    records, report = read(tmp_path, "visdrone", {"0001.txt": f"{VISDRONE}{line}"})
    assert len(records) == 2 and reasons(report) == {"bad_row": False}


@pytest.mark.parametrize("line", ["1,2,0,4,1,2,0,0", "nan,2,3,4,1,2,0,0", "x,2,3,4,1,2,0,0"])
def test_boxes_without_pixels_are_refused(tmp_path, line) -> None:
    records, report = read(tmp_path, "visdrone", {"0001.txt": f"{VISDRONE}{line}"})
    assert len(records) == 2 and reasons(report) == {"bad_row": False}


def test_an_image_of_ignored_regions_only_is_reported(tmp_path) -> None:
    records, report = read(tmp_path, "visdrone", {"0001.txt": "1,2,3,4,0,0,0,0\n"})
    assert not records and reasons(report) == {"ignored": False, "no_object": False}


def test_every_line_that_counts_comes_back(tmp_path) -> None:
    records, _ = read(tmp_path, "visdrone", {"0001.txt": VISDRONE})
    lines = [line for record in records for line in record.raw["lines"]]
    assert sorted(lines) == sorted(VISDRONE.splitlines())


@pytest.mark.parametrize(
    ("category", "annotation"),
    [("ignored-regions", {}), ("others", {}), ("human", {"ignore": 1}), ("human", {"score": 0})],
)
def test_the_coco_form_goes_by_names_since_class_0_may_be_another(
    tmp_path, category, annotation
) -> None:
    value = copy.deepcopy(COCO)
    value["categories"][0] = {"id": 0, "name": category}
    value["annotations"][0] |= {"category_id": 0, **annotation}
    records, report = read(tmp_path, "visdrone", {"a.json": value})
    assert {record.boxes[0].label for record in records} == {"cat"}
    assert reasons(report)["ignored"] is False
    value["categories"][0] = {"id": 0, "name": "human"}
    value["annotations"][0] |= {"ignore": 0, "score": 1}
    records, _ = read(tmp_path, "visdrone", {"a.json": value})
    assert {record.boxes[0].label for record in records} == {"human", "cat"}
