import json

import pytest
from PIL import Image

from data.record_rows import row
from reframe_vl.data.datamodule import check_evaluation_size, record_data
from reframe_vl.mini.source import mini_image_data


@pytest.fixture
def written(tmp_path):
    for name in "ab":
        Image.new("RGB", (100, 80)).save(tmp_path / f"{name}.png")

    def write(*rows):
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / "r.jsonl"

    return write


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None, "64"])
def test_an_evaluation_size_is_a_whole_number_of_at_least_one(size):
    with pytest.raises(ValueError, match=r"evaluation_size.*whole number"):
        check_evaluation_size(size)


def test_settings_of_the_data_that_cannot_work_are_refused(written):
    path = str(written(row("one")))
    with pytest.raises(ValueError, match="evaluation_size"):
        record_data(path, None, 0, "raise", 0)
    with pytest.raises(ValueError, match=r"on_error is 'ignore'.*raise.*skip"):
        record_data(path, None, 1, "ignore", 0)
    with pytest.raises(ValueError, match="evaluation_size"):
        mini_image_data(0.5, 1, 0.8, 0, 0)
    assert len(record_data(path, None, 1, "raise", 0).evaluation_samples()) == 1
    with pytest.raises(ValueError, match=r"only names 'colour'.*source, modality, applicability"):
        record_data(path, None, 1, "raise", 0, only={"colour": ["red"]})
    with pytest.raises(ValueError, match="mix_by names 'answer'"):
        record_data(path, None, 1, "raise", 0, mix_by="answer", weights={"a": 1})
    with pytest.raises(ValueError, match=r"validation_share.*evaluation_path"):
        record_data(path, path, 1, "raise", 0, validation_share=0.5)


def test_training_and_evaluation_share_no_media(written):
    rows = [
        row(f"{n}{m}", media={"path": f"{m}.png", "width": 100, "height": 80})
        for m in "ab"
        for n in range(3)
    ]
    data = record_data(str(written(*rows)), None, 8, "raise", 0, validation_share=0.5)
    train = {sample.media.path for sample in data.coming_samples(9)}
    held = {sample.media.path for sample in data.evaluation_samples()}
    assert len(train) == len(held) == 1 and train != held


def test_ranks_share_the_samples_of_a_mixture_and_a_resumed_run_goes_on_with_them(written):
    rows = [row(f"{n}", source="few" if n < 4 else "many") for n in range(20)]
    path = str(written(*rows))

    def data():
        return record_data(path, None, 1, "raise", 7, weights={"few": 1, "many": 1})

    alone = [sample.id for sample in data().coming_samples(40)]
    assert sum(int(name) < 4 for name in alone) == 20
    ranks = [data() for _ in range(2)]
    shares = [[s.id for s in rank.coming_samples(40, at, 2)] for at, rank in enumerate(ranks)]
    assert [alone[0::2], alone[1::2]] == shares
    first = data()
    begun = [sample.id for sample in first.coming_samples(13)]
    first.advance(13)
    resumed = data()
    resumed.load_state_dict(first.state_dict())
    assert begun + [sample.id for sample in resumed.coming_samples(27)] == alone


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"only": "image"}, r"data\.only is 'image'.*modality:\[image\]"),
        ({"only": ["image"]}, r"data\.only is \['image'\]"),
        ({"only": {"kind": ["image"]}}, r"data\.only names 'kind'.*source, modality"),
        ({"only": {"modality": None}}, r"data\.only\.modality is None: give a name"),
        ({"only": {"modality": []}}, r"data\.only\.modality is \[\].*leave modality out"),
        ({"only": {"modality": [True]}}, r"data\.only\.modality is \[True\]"),
        ({"only": {"modality": {"image": 1}}}, r"data\.only\.modality is \{'image': 1\}"),
        ({"weights": 3}, r"data\.weights is 3: .*weights=\{image:1,video:1\}"),
        ({"weights": {}}, r"data\.weights is \{\}"),
        ({"weights": {"s": "much"}}, r"data\.weights\.s is 'much': give a number"),
        ({"weights": {"s": None}}, r"data\.weights\.s is None"),
        ({"weights": {"s": True}}, r"data\.weights\.s is True"),
        ({"weights": {"s": -1}}, r"data\.weights\.s is -1.*at least 0"),
        ({"weights": {"s": float("inf")}}, r"data\.weights\.s is inf"),
        ({"mix_by": "kind"}, r"data\.mix_by names 'kind': give one of source, modality"),
        ({"mix_by": ["source"]}, r"data\.mix_by names \['source'\]"),
        ({"validation_share": 1.5}, r"data\.validation_share is 1\.5"),
        ({"path": 3}, r"data\.path is 3: give the name"),
        ({"evaluation_path": ["r.jsonl"]}, r"data\.evaluation_path is \['r\.jsonl'\]"),
    ],
)
def test_a_setting_of_a_wrong_kind_is_told_by_name_value_and_remedy(written, settings, words):
    given = {"path": str(written(row("one"))), "evaluation_path": None} | settings
    with pytest.raises(ValueError, match=words):
        record_data(evaluation_size=1, on_error="raise", seed=0, **given)


def test_one_name_may_stand_for_a_list_of_one_and_names_may_be_whole_numbers(written):
    path = str(written(row("one", source="2017"), row("two")))
    for only in ({"source": 2017}, {"source": [2017]}, {"source": "2017"}):
        data = record_data(path, None, 1, "raise", 0, only=only, weights={2017: 1})
        assert {sample.id for sample in data.coming_samples(2)} == {"one"}


def test_a_mixture_without_weights_is_said_to_change_nothing(written, caplog):
    record_data(str(written(row("one"))), None, 1, "raise", 0, mix_by="modality")
    assert "data.mix_by=modality changes nothing without data.weights" in caplog.text
