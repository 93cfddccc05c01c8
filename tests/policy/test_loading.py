"""All of a model comes from its folder, and all of the folder goes into the model."""

import pytest
import torch

from checkpoint_folders import base_folder, changed
from reframe_vl.policy.loading import LoRASettings, load_policy

LAYER = "model.language_model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("model") / "base")


def test_f11_a_folder_that_lacks_a_tensor_is_refused(base, tmp_path):
    lacking = changed(base, tmp_path / "lacking", lambda n, t: {} if n == LAYER else {n: t})
    with pytest.raises(ValueError, match=rf"{lacking} lacks tensors .* 1 in all \({LAYER}\)"):
        load_policy(lacking)


def test_f11_a_tensor_that_has_no_place_is_refused(base, tmp_path):
    def add(name, tensor):
        return {name: tensor} | ({"odd": tensor.clone()} if name == LAYER else {})

    odd = changed(base, tmp_path / "odd", add)
    with pytest.raises(ValueError, match=rf"{odd} holds tensors .* 1 in all \(odd\)"):
        load_policy(odd)


def test_f11_names_with_another_prefix_are_refused(base, tmp_path):
    other = changed(base, tmp_path / "other", lambda n, t: {f"base_model.model.{n}": t})
    with pytest.raises(ValueError, match=r"in all \(.*, …\)"):
        load_policy(other)


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.language_model.embed_tokens.weight"])
def test_f11_a_tied_head_may_be_stored_once_under_either_name(tmp_path, dropped):
    base = base_folder(tmp_path / "base", tied=True)

    def once(name, tensor):
        both = {"lm_head.weight": tensor, "model.language_model.embed_tokens.weight": tensor}
        return {n: t for n, t in both.items() if n != dropped} if name in both else {name: tensor}

    policy = load_policy(changed(base, tmp_path / "once", once))
    head, embedding = policy.model.base.lm_head.weight, policy.model.base.get_input_embeddings()
    assert torch.equal(head, embedding.weight)
    assert torch.equal(head, load_policy(base).model.base.lm_head.weight)


@pytest.mark.parametrize(
    "targets, words",
    [
        (
            ["embed_tokens"],
            r"takes in model\.language_model\.embed_tokens, which is of type Embedding",
        ),
        (
            r".*patch_embed\.proj",
            r"takes in model\.visual\.patch_embed\.proj, which is of type Conv3d",
        ),
    ],
)
def test_adapters_stand_beside_linear_layers_only(base, targets, words):
    with pytest.raises(ValueError, match=words):
        load_policy(base, lora=LoRASettings(rank=2, target_modules=targets))


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], "lm_head"])
def test_f02_an_adapter_of_a_tied_head_is_refused_before_training(base, tmp_path, targets):
    lora = LoRASettings(rank=2, target_modules=targets)
    with pytest.raises(ValueError, match="takes in lm_head, whose weight is the embedding's too"):
        load_policy(base_folder(tmp_path / "tied", tied=True), lora=lora)
    load_policy(base, lora=lora)
