import pickle
from pathlib import Path

import pytest

from data.sources.source_files import EXPRESSION, read, reasons

SENTENCES = [
    {"sent_id": 3, "sent": "dog on the left", "raw": "Dog on the left", "tokens": ["dog"]},
    {"sent_id": 4, "sent": "brown dog", "raw": "brown dog", "tokens": ["brown", "dog"]},
]
REF = {
    "ref_id": 1,
    "ann_id": 5,
    "image_id": 1,
    "category_id": 2,
    "split": "testA",
    "file_name": "COCO_train2014_000000000001_5.jpg",
    "sent_ids": [3, 4],
    "sentences": SENTENCES,
}
INSTANCES = {
    "images": [{"id": 1, "file_name": "COCO_1.jpg", "width": 100, "height": 80}],
    "categories": [{"id": 2, "name": "dog"}],
    "annotations": [{"id": 5, "image_id": 1, "category_id": 2, "bbox": [10.5, 20, 19.5, 20]}],
}


def pickled(tmp_path, refs, instances=INSTANCES, protocol=2):
    content = refs if isinstance(refs, bytes) else pickle.dumps(refs, protocol)
    files = {"refs(unc).p": content}
    if instances is not None:
        files["instances.json"] = instances
    return read(tmp_path, "refcoco", files)


def test_an_expression_asks_for_the_part_of_the_image(tmp_path) -> None:
    (record,), report = read(tmp_path, "refcoco", {"val.jsonl": [EXPRESSION]})
    assert record.question.endswith(": dog on the left")
    assert record.options["ABCDEFGHI".index(record.answer.value)] == "middle left"
    assert record.boxes[0].xyxy == (10.5, 20, 30, 40) and report.problems == []


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_give_one_record_a_sentence(tmp_path, protocol) -> None:
    records, report = pickled(tmp_path, [REF], protocol=protocol)
    assert [record.question.rpartition(": ")[2] for record in records] == [
        "dog on the left",
        "brown dog",
    ]
    for record in records:
        assert record.boxes[0].xyxy == (10.5, 20, 30, 40) and record.boxes[0].label == "dog"
        assert (record.split, record.media.path) == ("testA", "COCO_1.jpg")
        assert record.raw["ref"] == REF
    assert report.problems == []


class Harm:
    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize(
    "refs",
    [
        pickle.dumps([Harm()]),
        b"cos\nsystem\n(S'touch harmed'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        pickle.dumps([{1, 2}], 4),
        pickle.dumps([REF])[:-20],
        b"",
        b"no pickle",
        b"\x80\x02X\xff\xff\xff\x7f.",
        pickle.dumps({"refs": [REF]}),
    ],
    ids=range(9),
)
def test_pickles_run_nothing_and_broken_ones_are_refused(tmp_path, monkeypatch, refs) -> None:
    monkeypatch.chdir(tmp_path)
    records, report = pickled(tmp_path, refs)
    assert not records and not Path("harmed").exists()
    assert set(reasons(report)) <= {"bad_pickle", "bad_row"} and report.problems


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        ({**REF, "ann_id": 6}, "unknown_id"),
        ({**REF, "image_id": [1]}, "unknown_id"),
        ({**REF, "sentences": []}, "empty_question"),
        ({**REF, "sentences": [{"sent": " "}]}, "empty_question"),
        ({**REF, "sentences": None}, "bad_row"),
        ({**REF, "note": (1, 2)}, "bad_row"),
        ({**REF, 1: "key"}, "bad_row"),
        (7, "bad_row"),
    ],
)
def test_odd_refs_are_named_and_the_others_read(tmp_path, ref, reason) -> None:
    records, report = pickled(tmp_path, [ref, REF])
    assert len(records) == 2 and reasons(report) == {reason: False}


def test_a_pickle_needs_its_instances(tmp_path) -> None:
    records, report = pickled(tmp_path, [REF], instances=None)
    assert not records and reasons(report) == {"no_instances": False}
