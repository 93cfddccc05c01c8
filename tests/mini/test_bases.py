"""The shipped base checkpoints: loadable by transformers' own classes, small, and alike."""

import json

import pytest
import torch
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from reframe_vl.mini.base_measure import measure
from reframe_vl.mini.lessons import LessonWriter
from reframe_vl.mini.model import ASSETS, NUM_BASES, base_folder, build_model, save_checkpoint
from reframe_vl.mini.tokenizer import CHAT_TEMPLATE, build_tokenizer
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import codec_for

BASES = range(NUM_BASES)


def load(folder):
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return VisionLanguageModel(model, ViewMaker.from_pretrained(folder))


@pytest.mark.parametrize("index", BASES)
def test_a_base_loads_with_transformers_own_classes(index):
    folder = base_folder(index)
    _, report = Qwen3VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = codec_for("qwen3_vl", compact=True).render_call("CropImage", {"bbox_2d": [0, 0, 125, 5]})
    assert tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("index", BASES)
def test_the_familys_processor_leaves_views_as_they_are(index):
    folder = base_folder(index)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    maker = ViewMaker.from_pretrained(folder)
    image = MiniWorld().sample("test", 0).media
    for pixels in (image.look(None), image.look(None, 256)):
        output = processor(images=[pixels], return_tensors="np")
        view = maker.view(pixels)
        assert tuple(output["image_grid_thw"][0]) == view.grid_thw
        assert abs(output["pixel_values"] - maker.patches([view])).max() < 1e-6


def test_bases_differ_in_their_weights_only():
    for name in (p.name for p in base_folder(0).iterdir()):
        contents = {base_folder(index).joinpath(name).read_bytes() for index in BASES}
        assert len(contents) == (NUM_BASES if name == "model.safetensors" else 1), name


def test_the_shipped_files_are_what_the_code_writes(tmp_path):
    tokenizer = build_tokenizer()
    save_checkpoint(build_model(tokenizer, 0), tokenizer, tmp_path)
    for path in tmp_path.iterdir():
        shipped = base_folder(0) / path.name
        assert shipped.exists(), path.name
        if path.suffix == ".json":
            ours, theirs = (json.loads(p.read_text()) for p in (path, shipped))
            for settings in (ours, theirs):
                settings.pop("transformers_version", None)
            assert ours == theirs, path.name


def test_all_bases_take_at_most_five_megabytes():
    assert sum(p.stat().st_size for p in ASSETS.rglob("*") if p.is_file()) <= 5e6


def test_a_base_that_is_not_shipped_is_refused():
    with pytest.raises(ValueError, match="There is no base 3"):
        base_folder(3)


@pytest.mark.parametrize("world", [MiniWorld(), MiniVideoWorld()], ids=["image", "video"])
@pytest.mark.parametrize("index", BASES)
def test_a_base_uses_its_tools_weakly(index, world):
    model = load(base_folder(index))
    encoder = Encoder(AutoTokenizer.from_pretrained(base_folder(index)))
    writer = LessonWriter(codec_for("qwen3_vl", compact=True), encoder, model.view_maker)
    figures = measure(model, writer, world, num_scenes=128)
    assert 0.3 < figures.call_rate < 0.7
    assert figures.bad_turn_rate < 0.1
    assert figures.sampled_iou < 0.5
    assert 0.4 < figures.no_tool_accuracy < 0.75
    assert figures.oracle_dropped_accuracy > 0.85
