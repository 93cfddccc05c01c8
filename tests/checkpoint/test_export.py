import json
from functools import partial

import pytest
import torch
from safetensors import SafetensorError

from one_step import fixed_groups
from reframe_vl.algorithms.gdgrpo import GDGRPO
from reframe_vl.checkpoint.export import export_policy
from reframe_vl.policy.loading import LoRASettings, load_policy
from reframe_vl.policy.score import score
from tiny import sampling, tiny_model, tokenizer


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "base"
    tiny_model("qwen3_vl").base.save_pretrained(path)
    tokenizer().save_pretrained(path)
    settings = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings |= {"size": {"shortest_edge": 256, "longest_edge": 4096}}
    (path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    return path


def contexts(policy):
    groups = fixed_groups(policy.model, sampling())
    return [c for g in groups for r in g.rollouts for c in r.contexts]


def logprobs(policy):
    with policy.model.inference():
        return score(policy.model, contexts(policy), sampling()).logprobs_T


def test_an_exported_policy_loads_and_says_the_same(folder, tmp_path):
    policy = load_policy(folder)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
    export_policy(policy, tmp_path / "out")
    again = load_policy(tmp_path / "out")
    torch.testing.assert_close(logprobs(again), logprobs(policy), rtol=0, atol=0)


def test_f02_f07_merged_adapters_say_what_the_live_ones_say(folder, tmp_path):
    policy = load_policy(folder, lora=LoRASettings(rank=4))
    before = logprobs(policy)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    live = logprobs(policy)
    assert (live - before).abs().max() > 1e-2
    frozen = {n: p.clone() for n, p in policy.model.named_parameters()}
    export_policy(policy, tmp_path / "out")
    torch.testing.assert_close(logprobs(load_policy(tmp_path / "out")), live, rtol=0, atol=2e-5)
    # The adapter itself can be loaded onto the base, as a teacher's is.
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, frozen[name]), name


def test_a_processor_in_a_file_for_images_and_one_for_videos_is_exported_whole(folder, tmp_path):
    (folder / "processor_config.json").rename(folder / "preprocessor_config.json")
    settings = json.loads((folder / "preprocessor_config.json").read_text())["image_processor"]
    parts = {
        "preprocessor_config.json": settings,
        "video_preprocessor_config.json": settings | {"fps": 2},
        "chat_template.json": {"chat_template": "{{ messages }}"},
    }
    for name, content in parts.items():
        (folder / name).write_text(json.dumps(content))
    export_policy(load_policy(folder), tmp_path / "out")
    for name, content in parts.items():
        assert json.loads((tmp_path / "out" / name).read_text()) == content


def test_f10_an_older_export_is_replaced_whole(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_text("stale")
    export_policy(load_policy(folder), out)
    assert not (out / "model-00001-of-00002.safetensors").exists()


def test_a_full_disk_leaves_the_older_export_and_names_the_folder(folder, tmp_path, monkeypatch):
    policy = load_policy(folder)
    export_policy(policy, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(OSError, match=r"out could not be written \(No space left"):
        export_policy(policy, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_adapters_train_alone_and_checkpoints_hold_only_them(folder):
    policy = load_policy(folder, lora=LoRASettings(rank=4), freeze_vision=True)
    trained = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name and "visual" not in name for name in trained)
    module = GDGRPO(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1))
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert set(checkpoint["state_dict"]) == {f"policy.{n}" for n in trained}
    module.on_load_checkpoint(checkpoint)
    assert set(checkpoint["state_dict"]) == set(module.state_dict())


def test_f13_f21_a_checkpoint_of_other_parameters_is_refused_by_name(folder):
    full = GDGRPO(policy=load_policy(folder), optimizer=partial(torch.optim.SGD, lr=0.1))
    adapters = GDGRPO(
        policy=load_policy(folder, lora=LoRASettings(rank=4)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    checkpoint = {"state_dict": full.state_dict()}
    full.on_save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="LoRA"):
        adapters.on_load_checkpoint(checkpoint)


def test_c10_sampling_bans_vision_tokens_and_padded_ids(folder):
    policy = load_policy(folder)
    made = policy.sampling(0.7, 9)
    names = set(tokenizer().convert_ids_to_tokens([i for i in made.banned_ids if i < 335]))
    assert {"<|image_pad|>", "<|vision_start|>", "<|im_start|>"} <= names
    assert set(range(len(tokenizer()), 384)) <= set(made.banned_ids)
    assert made.stop_ids == (tokenizer().convert_tokens_to_ids("<|im_end|>"),)
