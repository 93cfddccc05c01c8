import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from checkpoint_folders import (
    base_folder,
    merged,
    specialist,
    weights,
)
from one_step import fixed_groups
from reframe_vl.checkpoint.parity import largest_gap
from reframe_vl.policy.loading import LoRASettings, load_policy
from tiny import sampling


def adapter_of(base, path, seed=1, **lora):
    """A policy with trained adapters, and their folder."""
    policy = load_policy(base, dtype="float32", lora=LoRASettings(**{"rank": 4} | lora))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    policy.model.model.save_pretrained(path)
    return policy, path


def test_f02_f13_merged_adapters_say_what_the_live_ones_say(made, tmp_path):
    base = made[0]
    live, folder = adapter_of(base, tmp_path / "adapter")
    for method in ("linear", "task_arithmetic"):
        merged((base, folder), tmp_path / method, method=method)
        groups = fixed_groups(live.model, sampling())[:2]
        contexts = [c for g in groups for r in g.rollouts for c in r.contexts]
        again = load_policy(tmp_path / method)
        assert largest_gap(again, live, contexts, sampling()) < 5e-5
        assert largest_gap(load_policy(base), live, contexts, sampling()) > 0.01


def test_f03_adapters_are_merged_as_their_product_in_float32_and_cast_last(tmp_path):
    base = base_folder(tmp_path / "base", dtype=torch.bfloat16)
    (_, one), (_, two) = (adapter_of(base, tmp_path / n, i) for i, n in enumerate("ab"))
    full = specialist(base, tmp_path / "full", 5)
    share = [0.5, 0.25, 0.125]
    found = merged(
        (base, one, two, full), tmp_path / "out", method="task_arithmetic", weights=share
    )
    factors = [load_file(folder / "adapter_model.safetensors") for folder in (one, two)]
    name = "model.language_model.layers.0.mlp.up_proj"
    products = [
        8.0
        * f[f"base_model.model.{name}.lora_B.weight"]
        @ f[f"base_model.model.{name}.lora_A.weight"]
        for f in factors
    ]
    start = weights(base)[f"{name}.weight"].float()
    expected = start + 0.5 * products[0] + 0.25 * products[1]
    expected += 0.125 * (weights(full)[f"{name}.weight"].float() - start)
    torch.testing.assert_close(found[f"{name}.weight"], expected.bfloat16(), rtol=2**-8, atol=1e-6)
    assert (found[f"{name}.weight"] == expected.bfloat16()).float().mean() > 0.99


def edited_adapter(folder, path, rename=lambda n: n, **settings):
    path.mkdir()
    found = load_file(folder / "adapter_model.safetensors")
    save_file({rename(n): t for n, t in found.items()}, path / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_f12_f13_an_adapter_fits_by_old_and_new_names_and_is_refused_by_others(made, tmp_path):
    base = made[0]
    _, folder = adapter_of(base, tmp_path / "adapter")
    expected = merged((base, folder), tmp_path / "new")
    old = edited_adapter(
        folder, tmp_path / "o", lambda n: n.replace("model.language_model", "model")
    )
    found = merged((base, old), tmp_path / "old")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    wrong = edited_adapter(folder, tmp_path / "w", lambda n: n.replace("layers", "blocks"))
    with pytest.raises(ValueError, match=r"No tensor of .*/w belongs to"):
        merged((base, wrong), tmp_path / "out")
    part = edited_adapter(folder, tmp_path / "p", lambda n: n.replace("layers.1", "layers.7"))
    with pytest.raises(ValueError, match=r"layers\.7.* lacks"):
        merged((base, part), tmp_path / "out")


def test_ranks_and_scales_of_single_modules_are_followed(made, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = made[0]
    model = AutoModelForImageTextToText.from_pretrained(base)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=r".*language_model.*\.(q|up)_proj",
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\.up_proj": 16},
        init_lora_weights=False,
        modules_to_save=["lm_head"],
    )
    live = get_peft_model(model, config)
    with torch.no_grad():
        live.base_model.model.lm_head.modules_to_save.default.weight.add_(1)
    live.save_pretrained(tmp_path / "adapter")
    found = merged((base, tmp_path / "adapter"), tmp_path / "out")
    for name, tensor in live.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"peft_type": "LOHA"}, "only LoRA"),
    ],
)
def test_adapters_that_are_more_than_a_product_are_refused(made, settings, words, tmp_path):
    _, folder = adapter_of(made[0], tmp_path / "adapter")
    other = edited_adapter(folder, tmp_path / "other", **settings)
    with pytest.raises(ValueError, match=words):
        merged((made[0], other), tmp_path / "out")


def test_factors_must_have_the_rank_that_their_settings_scale_by(made, tmp_path):
    _, folder = adapter_of(made[0], tmp_path / "adapter")
    other = edited_adapter(folder, tmp_path / "other", r=16)
    with pytest.raises(ValueError, match=r"/other gives model\..* the rank 16 .* A of shape \[4, "):
        merged((made[0], other), tmp_path / "out")
    file = folder / "adapter_model.safetensors"
    factors = load_file(file)
    name = next(name for name in factors if "lora_B" in name)
    save_file(factors | {name: factors[name][:, :3].contiguous()}, file)
    with pytest.raises(ValueError, match=r"the rank 4 .* and B of \[\d+, 3\]"):
        merged((made[0], folder), tmp_path / "out")


def test_f02_an_adapter_of_one_end_of_a_tie_is_refused(tmp_path):
    base = base_folder(tmp_path / "base", tied=True)
    untied = base_folder(tmp_path / "untied")
    _, folder = adapter_of(untied, tmp_path / "adapter", target_modules=["lm_head"])
    with pytest.raises(ValueError, match="would change both"):
        merged((base, folder), tmp_path / "out")


def test_an_adapter_of_another_base_is_refused_by_name(tmp_path):
    one = base_folder(tmp_path / "one")
    other = base_folder(tmp_path / "other")
    _, folder = adapter_of(one, tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"was trained on {one}, and the base is {other}"):
        merged((other, folder), tmp_path / "out")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "someone/other"
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    merged((other, folder), tmp_path / "out")


def test_adapters_of_two_runs_policies_are_not_of_one_base(tmp_path):
    one, two = (base_folder(tmp_path / name / "policy") for name in ("one", "two"))
    _, folder = adapter_of(one, tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"was trained on {one}, and the base is {two}"):
        merged((two, folder), tmp_path / "out")
    # A link to a base is the base.
    (tmp_path / "link").symlink_to(one)
    merged((tmp_path / "link", folder), tmp_path / "out")
