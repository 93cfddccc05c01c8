"""What goes into a page."""

import base64
import gzip
import json
import re

import numpy as np
import pytest
from PIL import Image

from reframe_vl.rewards.total import RewardWeights
from reframe_vl.viewer.__main__ import main
from reframe_vl.viewer.page import SCRIPTS, build_page
from reframe_vl.viewer.pictures import encode
from reframe_vl.viewer.pieces import Splitter, find_splitter
from reframe_vl.viewer.reading import entries, find_runs
from tiny import tokenizer


def packed(page, name):
    blocks = re.findall(rf'<script type="text/plain" id="{name}-\d+">([^<]*)</script>', page)
    if name == "images":
        return [line for block in blocks for line in block.split("\n")]
    return [json.loads(gzip.decompress(base64.b64decode(block))) for block in blocks]


def spans(rollout):
    return [
        span for kind in ("contexts", "branches") for context in rollout[kind] for span in context
    ]


def test_the_index_has_a_value_of_each_column_for_each_rollout(page):
    [index] = packed(page, "index")
    assert {len(values) for values in index["columns"].values()} == {10}
    assert index["columns"]["step"] == [0] * 5 + [3] * 5
    assert index["columns"]["reward"][:4] == [1.0, 0.25, None, "Infinity"]
    assert index["columns"]["dropped"][:4] == [0, 1, 0, 0]
    assert index["columns"]["gated"][:4] == [0, 0, 2, 0]
    assert len(index["samples"]) == 2
    details = [rollout for block in packed(page, "details") for rollout in block]
    assert len(details) == 10
    assert index["firsts"][0] == 0


def test_reward_weights_are_those_of_the_rollouts_step(page):
    [index] = packed(page, "index")
    weights = RewardWeights(grounding=0.0)
    assert index["runs"][0]["factors"] == {
        "0": weights.factors(0.0),
        "3": weights.factors(0.3),
    }


def test_trained_spans_have_a_text_a_token_and_what_is_known_of_each(page):
    for block in packed(page, "details"):
        for rollout in block:
            for span in spans(rollout):
                trained = span["by"] in ("sampled", "injected") and not span.get("carried")
                assert ("pieces" in span) == trained
                if trained:
                    assert "".join(span["pieces"]) == span["text"]
                    assert len(span["pieces"]) == span["tokens"] == len(span["ids"])
    first = packed(page, "details")[0][1]
    [_, said, *_] = spans(first)
    assert set(said["logprobs"]) == {-0.5} and set(said["teacher"]) == {-1.0}


def test_an_image_is_in_the_page_once_and_a_broken_one_is_named(page):
    lines = packed(page, "images")
    assert sum(line.startswith("!") for line in lines) == 2
    whole = [line for line in lines if not line.startswith("!")]
    assert len(set(whole)) == len(whole)
    used = {
        number
        for block in packed(page, "details")
        for rollout in block
        for span in spans(rollout)
        for view in span.get("views", ())
        for number in view
    }
    assert used == set(range(len(lines)))


def test_nothing_that_a_model_wrote_stands_in_the_page_as_it_is(page):
    assert "window.hacked" not in page
    assert "<b>name" not in page
    # The blocks of data, the page's own script and nothing else.
    assert page.count("<script") == page.count("</script>")
    assert len(re.findall(r'<script type="module">', page)) == 1
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page
    assert not re.search(r"(?:src|href)=[\"']?https?:", page)


def test_the_same_rollouts_give_the_same_page(run, tmp_path, page):
    again = main([str(run), "--out", str(tmp_path / "again.html")])
    assert again.read_text(encoding="utf-8") == page


def test_steps_are_chosen_by_their_numbers(run, tmp_path):
    page = main([str(run), "--steps", "1:100:2", "--side", "0", "--out", str(tmp_path / "p.html")])
    text = page.read_text(encoding="utf-8")
    [index] = packed(text, "index")
    assert set(index["columns"]["step"]) == {3}
    assert all(line.startswith("!") for line in packed(text, "images"))
    with pytest.raises(SystemExit, match="--steps"):
        main([str(run), "--steps", "50", "--out", str(tmp_path / "none.html")])


def test_runs_are_named_by_what_tells_them_apart(run, tmp_path):
    for name in ("a/x/run", "b/x/run"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(run)
    copies = [tmp_path / name / "rollouts" for name in ("a/x/run", "b/x/run")]
    with pytest.raises(ValueError, match="twice"):
        find_runs(copies)
    [found] = find_runs([run])
    assert found.name == "odd <b>name/run"
    assert len(list(entries([found], slice(None)))) == 10
    with pytest.raises(FileNotFoundError, match="no rollouts"):
        find_runs([tmp_path])


def test_small_images_keep_their_pixels_and_large_ones_are_reduced(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    size, kind, text = encode(pixels, 320).split(";")
    (tmp_path / "image").write_bytes(base64.b64decode(text))
    assert (size, kind) == ("32x24", "png")
    assert np.array_equal(np.array(Image.open(tmp_path / "image")), pixels)
    large = encode(np.zeros((900, 1200, 3), np.uint8), 320)
    assert large.startswith("320x240;webp;")


def test_a_character_of_several_tokens_stands_at_its_last_one(run):
    [found] = find_runs([run])
    splitter = find_splitter(found)
    text = "né 漢\U0001f600!"
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    pieces = splitter.split(ids, text)
    assert len(pieces) == len(ids) > len(text)
    assert "".join(pieces) == text
    # Cut within a character, as by a turn's limit.
    cut = ids[: len(ids) - 3]
    broken = tokenizer().decode(cut, skip_special_tokens=False)
    assert "".join(splitter.split(cut, broken)) == broken


def test_tokens_of_another_tokenizer_are_not_shown_as_these(run):
    [found] = find_runs([run])
    splitter = find_splitter(found)
    assert isinstance(splitter, Splitter)
    ids = tokenizer()("seven", add_special_tokens=False)["input_ids"]
    assert splitter.split(ids, "eight") is None
    assert splitter.split(ids, "seven and more") is None


def test_without_a_tokenizer_turns_are_shown_whole(run, tmp_path, caplog):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "rollouts").symlink_to(run / "rollouts")
    page = main([str(copy), "--out", str(tmp_path / "page.html")]).read_text(encoding="utf-8")
    assert "--tokenizer" in caplog.text
    assert not any(
        "pieces" in span for block in packed(page, "details") for r in block for span in spans(r)
    )


def test_every_script_of_the_page_is_used(page):
    from importlib.resources import files

    folder = files("reframe_vl.viewer").joinpath("page")
    names = {entry.name for entry in folder.iterdir()}
    assert names == {f"{name}.js" for name in SCRIPTS} | {"page.html", "page.css"}
    assert callable(build_page)
