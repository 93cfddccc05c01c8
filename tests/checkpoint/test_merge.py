import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_folders import (
    base_folder,
    bits,
    changed,
    keep,
    load_report,
    merged,
    specialist,
    weights,
)
from one_step import fixed_groups
from reframe_vl.checkpoint import merge as merge_module
from reframe_vl.checkpoint.merge import (
    METHODS,
    MergeSettings,
    combined_change,
    merge_checkpoints,
    weighted_mean,
)
from reframe_vl.checkpoint.parity import largest_gap
from reframe_vl.policy.loading import load_policy
from tiny import FAMILIES, sampling

NORM = "model.language_model.norm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_f05_weights_1_and_0_give_the_first_checkpoint_bit_for_bit(dtype, tmp_path):
    base = base_folder(tmp_path / "base", dtype=dtype)
    first = changed(base, tmp_path / "one", lambda n, t: {n: torch.where(t > 0, t * 2, -0.0 * t)})
    assert any((t == 0).any() and t.signbit().any() for t in weights(first).values())
    second = changed(base, tmp_path / "two", lambda n, t: {n: torch.full_like(t, math.inf)})
    found = merged((base, first, second), tmp_path / "out", weights=[1, 0])
    expected = weights(first)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype is dtype
        assert torch.equal(bits(tensor), bits(expected[name])), name


@pytest.mark.parametrize("method", METHODS)
def test_merging_the_base_with_itself_gives_the_base_bit_for_bit(method, tmp_path):
    base = base_folder(tmp_path / "base", dtype=torch.bfloat16)
    found = merged((base, base, base), tmp_path / "out", method=method, weights=[0.3, 0.4])
    for name, tensor in weights(base).items():
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("method", METHODS)
def test_f03_each_tensor_is_merged_in_float32_and_cast_last(method, tmp_path):
    base = base_folder(tmp_path / "base", dtype=torch.bfloat16)
    one, two = (specialist(base, tmp_path / name, n) for n, name in enumerate("ab"))
    settings = MergeSettings(method, [0.5, 0.25], 0.5)
    found = merged((base, one, two), tmp_path / "out", method=method, weights=[0.5, 0.25])
    moved = [weights(folder) for folder in (one, two)]
    for name, tensor in weights(base).items():
        ours, theirs = (held[name].float() for held in moved)
        if method == "linear":
            expected = weighted_mean([ours, theirs], [0.5, 0.25])
        else:
            changes = [ours - tensor.float(), theirs - tensor.float()]
            expected = tensor.float() + combined_change(changes, [0.5, 0.25], settings, name)
        assert torch.equal(found[name], expected.bfloat16()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_f07_f11_a_merge_has_every_tensor_of_its_family_and_loads_without_a_remark(
    family, tmp_path
):
    base = base_folder(tmp_path / "base", family, shards=3)
    one, two = (specialist(base, tmp_path / name, n) for n, name in enumerate("ab"))
    found = merged((base, one, two), tmp_path / "out", method="task_arithmetic")
    moved = [weights(folder) for folder in (one, two)]
    for name, tensor in weights(base).items():
        expected = moved[0][name] + moved[1][name] - tensor
        torch.testing.assert_close(found[name], expected)
    assert found.keys() == weights(base).keys()
    assert load_report(tmp_path / "out") == {}


def test_a_merge_keeps_shards_tokenizer_and_settings_and_can_be_played(made, tmp_path):
    base, one, _ = made
    out = tmp_path / "out"
    merged(made, out, weights=[1, 0])
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in out.iterdir()} == names | {"merge.json"}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: f.name for f in out.glob("*.safetensors") for name in load_file(f)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(out).values())
    assert json.loads((out / "merge.json").read_text())["weights"] == [1.0, 0.0]
    policies = [load_policy(folder) for folder in (out, one, base)]
    how = sampling()
    contexts = [
        context
        for group in fixed_groups(policies[0].model, how)[:2]
        for rollout in group.rollouts
        for context in rollout.contexts
    ]
    assert largest_gap(policies[0], policies[1], contexts, how) == 0
    assert largest_gap(policies[0], policies[2], contexts, how) > 0.01


def test_the_outcome_does_not_depend_on_shards(made, tmp_path):
    joined = []
    for folder in made:
        joined.append(tmp_path / folder.name)
        joined[-1].mkdir()
        save_file(weights(folder), joined[-1] / "model.safetensors", {"format": "pt"})
        (joined[-1] / "config.json").write_bytes((folder / "config.json").read_bytes())
    for method in ("linear", "dare_ties"):
        apart = merged(made, tmp_path / f"{method}_apart", method=method)
        # The base decides the output's form; checkpoints may have another.
        mixed = (joined[0], made[1], joined[2])
        whole = merged(mixed, tmp_path / f"{method}_whole", method=method)
        assert apart.keys() == whole.keys()
        assert all(torch.equal(apart[name], whole[name]) for name in apart)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_f04_f05_a_dtype_can_be_asked_for_and_is_told_in_the_settings(made, dtype, tmp_path):
    exact = merged(made, tmp_path / "exact", method="ties")
    cast = merged(made, tmp_path / "out", method="ties", dtype=dtype)
    for name, tensor in cast.items():
        assert torch.equal(tensor, exact[name].to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype
    policies = [load_policy(tmp_path / name) for name in ("exact", "out")]
    groups = fixed_groups(policies[0].model, sampling())[:2]
    contexts = [c for g in groups for r in g.rollouts for c in r.contexts]
    gap = largest_gap(*policies, contexts, sampling())
    assert 0 < gap < 0.5


def test_f04_values_that_a_dtype_cannot_hold_are_refused_by_name(made, tmp_path):
    base, one, _ = made
    big = changed(one, tmp_path / "big", lambda n, t: {n: t + 1e6 if n == NORM else t})
    with pytest.raises(ValueError, match=re.escape(f"{NORM} is not finite in torch.float16")):
        merged((base, big), tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


# ------------------------------------------------------------------ folders


def test_f10_a_used_folder_is_refused_and_replaced_whole_on_demand(made, tmp_path):
    base, one, _ = made
    out = tmp_path / "out"
    out.mkdir()
    stale = out / "model.safetensors"
    stale.write_text("stale")
    with pytest.raises(FileExistsError, match="is not empty"):
        merged((base, one), out)
    assert stale.read_text() == "stale"
    merge_checkpoints(base, [one], out, MergeSettings(), replace=True)
    assert not stale.exists()
    assert load_report(out) == {}


def test_f10_a_checkpoint_of_two_saves_is_refused(made, tmp_path):
    base, one, _ = made
    mixed = changed(one, tmp_path / "mixed", keep)
    save_file(weights(base), mixed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="older save"):
        merged((base, mixed), tmp_path / "out")


def test_f10_other_weights_beside_the_bases_do_not_come_along(made, tmp_path):
    base, one, _ = made
    beside = changed(base, tmp_path / "beside", keep)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        (beside / name).write_text("{}")
    merged((beside, one), tmp_path / "out")
    assert not list((tmp_path / "out").glob("pytorch_model*"))


def test_a_merge_that_fails_leaves_no_folder(made, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(merge_module, "write_safetensors", fail)
    with pytest.raises(OSError, match="No space"):
        merged(made, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_read_are_refused_by_name(made, tmp_path):
    base, one, _ = made
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        merged((base, tmp_path), tmp_path / "out")
    cut = changed(one, tmp_path / "cut", keep)
    shard = min(cut.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard.name} cannot be read"):
        merged((base, cut), tmp_path / "out")
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shard.name}"):
        merged((base, cut), tmp_path / "out")
    config = json.loads((one / "config.json").read_text())
    quantised = changed(one, tmp_path / "quantised", keep)
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised"):
        merged((base, quantised), tmp_path / "out")


def test_checkpoints_with_other_tokens_are_refused(made, tmp_path):
    base, one, two = made
    other = changed(one, tmp_path / "other", keep)
    settings = json.loads((other / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"The token .* in {other} and .* in {base}"):
        merged((base, two, other), tmp_path / "out")
    # Weights alone say nothing of tokens.
    (other / "tokenizer.json").unlink()
    merged((base, two, other), tmp_path / "out")


def test_the_output_may_not_lie_inside_what_is_merged(made, tmp_path):
    base, one, _ = made
    mine = changed(one, tmp_path / "mine", keep)
    before = sorted(mine.rglob("*"))
    with pytest.raises(ValueError, match=f"lies inside {mine}"):
        merged((base, mine), mine / "deep" / "out")
    assert sorted(mine.rglob("*")) == before


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"weights": ["a", "b"]}, "must be a list of numbers"),
        ({"weights": 0.5}, "must be a list of numbers"),
        ({"weights": "0.5"}, "must be a list of numbers"),
        ({"weights": [1, None]}, "must be a list of numbers"),
        ({"weights": [True, 1]}, "must be a list of numbers"),
        ({"density": "a"}, "density=a must be a number"),
    ],
)
def test_settings_that_are_no_numbers_are_told_in_a_sentence(settings, words):
    # As they come from a command, whatever their types.
    with pytest.raises(ValueError, match=words):
        MergeSettings.__post_init__(SimpleNamespace(**{**asdict(MergeSettings()), **settings}))


def memory(field):
    """Kibibytes of this process: VmRSS is now, VmHWM the most since it was last cleared."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1])


def test_memory_does_not_grow_with_the_checkpoints(made, tmp_path):
    clear = Path("/proc/self/clear_refs")
    try:
        clear.write_text("5")
    except OSError:
        pytest.skip("The peak of memory cannot be cleared here.")
    folders = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "config.json").write_bytes((made[0] / "config.json").read_bytes())
        rows = {f"layer.{n}": torch.full((2**19,), float(n + seed)) for n in range(32)}
        save_file(rows, folder / "model.safetensors")
        folders.append(folder)
    num_bytes = sum(row.nbytes for row in rows.values())
    del rows
    before = memory("VmRSS")
    clear.write_text("5")
    merge_checkpoints(folders[0], folders[1:], tmp_path / "out", MergeSettings("task_arithmetic"))
    # One checkpoint alone would be as much.
    assert (memory("VmHWM") - before) * 1024 < 0.75 * num_bytes
