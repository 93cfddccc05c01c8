"""Models by their name on the hub; the hub itself is not asked, its cache is."""

import json
import shutil

import pytest
from huggingface_hub import constants

from reframe_vl.checkpoint.export import export_policy
from reframe_vl.mini.model import base_folder
from reframe_vl.policy.hub import local_folder
from reframe_vl.policy.loading import LoRASettings, load_policy


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache with one model, Org/Name."""
    model = tmp_path / "hub" / "models--Org--Name"
    shutil.copytree(base_folder(0), model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return model / "snapshots" / "abc"


def test_a_policy_is_loaded_and_exported_by_its_name_on_the_hub(cached, tmp_path):
    policy = load_policy("Org/Name", lora=LoRASettings(rank=2))
    assert policy.path == "Org/Name"
    assert policy.model.view_maker == load_policy(cached).model.view_maker
    export_policy(policy, tmp_path / "out")
    again = load_policy(tmp_path / "out")
    assert again.model.view_maker == policy.model.view_maker
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    # Another machine has another cache.
    adapter = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "Org/Name"


def test_a_base_that_has_gone_meanwhile_does_not_lose_what_was_trained(cached, tmp_path):
    policy = load_policy(cached)
    shutil.rmtree(cached)
    export_policy(policy, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("path", ["Org/Gone", "/nowhere/model", "a/b/c"])
def test_a_model_that_is_neither_here_nor_on_the_hub_is_named(cached, path):
    with pytest.raises(FileNotFoundError, match=f"No checkpoint folder at {path}"):
        local_folder(path)
