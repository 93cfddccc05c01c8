import re

import pytest
import torch
from transformers import AutoModelForImageTextToText

from checkpoint_folders import base_folder, changed, keep, load_report, merged, specialist, weights
from reframe_vl.checkpoint.folder import current_name

HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
NORM = "model.language_model.norm.weight"


def test_f07_f11_tensors_that_are_missing_or_unknown_are_named(made, tmp_path):
    base, one, _ = made
    visual = "model.visual.patch_embed.proj.weight"
    less = changed(one, tmp_path / "less", lambda n, t: {} if n == visual else {n: t})
    with pytest.raises(ValueError, match=re.escape(f"lacks the tensor {visual}")):
        merged((base, less), tmp_path / "out")
    more = changed(
        one, tmp_path / "more", lambda n, t: {n: t} | ({"value.weight": t + 1} if n == NORM else {})
    )
    # The index says nothing of it: what counts is what the files hold.
    with pytest.raises(ValueError, match=re.escape("the tensor value.weight")):
        merged((base, more), tmp_path / "out")
    # A tensor of the base alone would be left as it is without a word.
    with pytest.raises(ValueError, match=re.escape("lacks the tensor value.weight")):
        merged((more, one), tmp_path / "out")
    off = changed(one, tmp_path / "off", lambda n, t: {f"module.{n}": t})
    with pytest.raises(ValueError, match="lacks 64 tensors"):
        merged((base, off), tmp_path / "out")
    wide = changed(one, tmp_path / "wide", lambda n, t: {n: t[:3] if n == NORM else t})
    with pytest.raises(ValueError, match=r"norm.weight of .* has shape \[3\]"):
        merged((base, wide), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_f11_a_tensor_that_all_lack_is_told_by_the_index(made, tmp_path):
    visual = "model.visual.patch_embed.proj.weight"
    less = [
        changed(folder, tmp_path / folder.name, lambda n, t: {} if n == visual else {n: t})
        for folder in made
    ]
    with pytest.raises(ValueError, match=rf"base lacks the tensor {visual}, which its model"):
        merged(less, tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_broken_index_or_tokenizer_is_named(made, tmp_path, text):
    base, one, _ = made
    broken = changed(one, tmp_path / "broken", keep)
    (broken / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"broken/model\.safetensors\.index\.json cannot be read"):
        merged((base, broken), tmp_path / "out")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken/tokenizer\.json cannot be read"):
        merged((base, broken), tmp_path / "out")


def test_an_adapter_beside_the_base_does_not_come_along(made, tmp_path):
    base, one, _ = made
    both = changed(base, tmp_path / "both", keep)
    (both / "adapter_config.json").write_text("{}")
    merged((both, one), tmp_path / "out")
    assert load_report(tmp_path / "out") == {}


def test_whole_numbers_are_compared_as_they_are(made, tmp_path):
    def add(number):
        extra = {"model.language_model.ids": torch.tensor([number])}
        return lambda n, t: {n: t} | (extra if n == NORM else {})

    base = changed(made[0], tmp_path / "base", add(2**24))
    other = changed(made[1], tmp_path / "other", add(2**24 + 1))
    with pytest.raises(ValueError, match=r"ids differs, but cannot be merged: it is torch\.int64"):
        merged((base, other), tmp_path / "out")
    same = merged((base, base), tmp_path / "same")
    assert same["model.language_model.ids"].tolist() == [2**24]


def test_f11_heads_for_speculative_decoding_stay_the_bases(made, tmp_path):
    base, one, two = made
    extra = torch.randn(4, 4)
    full = changed(
        base,
        tmp_path / "full",
        lambda n, t: {n: t} | ({"mtp.fc.weight": extra} if n == NORM else {}),
    )
    for method in ("linear", "dare_ties"):
        found = merged((full, one, two), tmp_path / method, method=method)
        assert torch.equal(found["mtp.fc.weight"], extra)


def test_f12_old_and_new_names_are_merged_and_the_bases_are_written(tmp_path):
    old = base_folder(tmp_path / "old", "qwen2_5_vl")
    assert {name.partition(".")[0] for name in weights(old)} == {"visual", "model", "lm_head"}
    one = specialist(old, tmp_path / "one", 1)
    renamed = changed(one, tmp_path / "renamed", lambda n, t: {current_name(n): t})
    assert any(name.startswith("model.visual.") for name in weights(renamed))
    found = merged((old, one, renamed), tmp_path / "out", weights=[0.5, 0.5])
    for name, tensor in weights(one).items():
        assert torch.equal(found[name], tensor)
    new = changed(old, tmp_path / "new", lambda n, t: {current_name(n): t})
    again = merged((new, one), tmp_path / "again")
    assert again.keys() == weights(new).keys()
    assert load_report(tmp_path / "out") == load_report(tmp_path / "again") == {}


@pytest.mark.parametrize("stored", [{HEAD}, {EMBEDDING}, {HEAD, EMBEDDING}])
def test_f08_f20_a_tie_is_resolved_whichever_end_is_stored(stored, tmp_path):
    base = base_folder(tmp_path / "base", tied=True)
    assert HEAD not in weights(base)
    one = specialist(base, tmp_path / "one", 1)

    def store(name, tensor):
        ends = {end: tensor.clone() for end in stored}
        return ends if name == EMBEDDING else {name: tensor}

    other = changed(one, tmp_path / "other", store)
    found = merged((base, other), tmp_path / "out")
    assert found.keys() == weights(base).keys()
    assert torch.equal(found[EMBEDDING], weights(one)[EMBEDDING])
    assert load_report(tmp_path / "out") == {}
    # As the base too: the tie is kept.
    again = merged((other, one), tmp_path / "again")
    assert len({HEAD, EMBEDDING} & again.keys()) == 1
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weights(one)[EMBEDDING])


def test_f02_tied_and_untied_models_and_a_head_that_breaks_its_tie_are_refused(made, tmp_path):
    tied = base_folder(tmp_path / "tied", tied=True)
    with pytest.raises(ValueError, match="ties its head to the embedding and"):
        merged((tied, made[1]), tmp_path / "out")
    with pytest.raises(ValueError, match="ties its head to the embedding and"):
        merged((made[0], tied), tmp_path / "out")
    broken = changed(
        tied, tmp_path / "broken", lambda n, t: {n: t} | ({HEAD: t + 1} if n == EMBEDDING else {})
    )
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        merged((tied, broken), tmp_path / "out")
