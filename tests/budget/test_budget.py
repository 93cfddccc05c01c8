from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_folders import base_folder
from reframe_vl.budget.__main__ import _composed, _settings, main
from reframe_vl.budget.memory import STRATEGIES, Settings, memory, together
from reframe_vl.budget.shape import shape_of
from reframe_vl.budget.speed import DEVICES, Step, seconds
from reframe_vl.policy.loading import LoRASettings, load_policy

SETTINGS = Settings(
    strategy="auto",
    ranks=1,
    bytes_per_number=2,
    optimizer_numbers=2,
    forward_tokens=16384,
    logits_chunk=4096,
    recomputes=True,
    reference=False,
    teachers=0,
    sequences=0,
    context_tokens=32768,
    engine_share=0.0,
    device_gib=80.0,
)
GIB = 2**30


@pytest.fixture(scope="module")
def large():
    return shape_of("Qwen/Qwen3.5-9B", freeze_vision=True)


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=4)])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_counts_are_those_of_the_loaded_model(family, freeze, lora, tmp_path):
    folder = base_folder(tmp_path / "base", family)
    found = shape_of(str(folder), lora, freeze)
    model = load_policy(folder, lora=lora, freeze_vision=freeze).model
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.vision == sum(p.numel() for p in model.visual.parameters())
    held = sum(p.numel() for layer in model.language_model.layers for p in layer.parameters())
    blocks = sum(p.numel() for block in model.visual.blocks for p in block.parameters())
    assert found.outside == found.parameters - held - blocks


def test_the_full_size_model_is_known_without_the_hub(large):
    assert 9e9 < large.parameters < 10e9
    assert large.trained == large.parameters - large.vision
    # Eight full-attention layers with four heads of 256 numbers keep keys and values.
    assert large.kv_numbers == 8 * 2 * 4 * 256


def test_one_process_holds_weights_gradients_and_two_moments(large):
    terms = memory(large, SETTINGS)
    # What is trained is kept in single precision, and cast for a forward.
    assert terms["weights"] * GIB == large.parameters * 2 + large.trained * 2
    assert terms["working copies"] * GIB < 0.3 * large.trained * 2
    whole = memory(large, replace(SETTINGS, recomputes=False))
    assert whole["working copies"] * GIB == large.trained * 2
    assert terms["gradients"] * GIB == large.trained * 4
    assert terms["optimiser"] * GIB == large.trained * 8


@given(st.sampled_from(STRATEGIES[2:]), st.sampled_from([2, 4, 8, 64]))
def test_more_ranks_never_take_more_memory_each(large, strategy, ranks):
    few = together(memory(large, replace(SETTINGS, strategy=strategy, ranks=ranks)))
    many = together(memory(large, replace(SETTINGS, strategy=strategy, ranks=2 * ranks)))
    assert many < few


def test_adapters_need_almost_no_optimiser(large):
    adapted = shape_of("Qwen/Qwen3.5-9B", LoRASettings(), freeze_vision=True)
    terms = memory(adapted, SETTINGS)
    assert terms["optimiser"] < 0.5 < terms["weights"] < 18


def test_bounds_shrink_with_ranks_and_name_each_part(large):
    step = Step(64, 8, 4000, 1000, 800, 8)
    one = seconds(large, SETTINGS, step, DEVICES["h200"])
    eight = seconds(large, replace(SETTINGS, strategy="fsdp2", ranks=8), step, DEVICES["h200"])
    assert eight["training"] == pytest.approx(one["training"] / 8)
    assert one["communication"] == 0 < eight["communication"]
    assert step.packed_tokens == 64 * (4000 + 8 * 1000)


def test_it_takes_the_overrides_of_training(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main(["scale=paper", "rollout=vllm", "strategy=fsdp2", "trainer.devices=8", "--device=h200"])
    shown = capsys.readouterr().out
    assert "strategy=fsdp2, 8 x h200" in shown and "most at one time" in shown
    main([])
    assert "0.00 billion" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="stepz"):
        main(["stepz=3"])
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize(
    ("overrides", "teachers"),
    [
        ([], 2),
        (["algorithm.teachers.offload=true"], 0),
        (["algorithm.teachers.hosting=adapters"], 1),
        (["algorithm.teachers.hosting=adapters", "algorithm.teachers.offload=true"], 1),
        (["algorithm.teachers.hosting=adapters", "model.lora={rank:8}"], 0),
        (["teachers.spatial=http://a:1", "teachers.temporal=http://b:1"], 0),
        (["teachers.spatial=http://a:1"], 1),
    ],
)
def test_teachers_count_as_the_models_that_a_rank_holds_for_them(overrides, teachers):
    cfg, strategy = _composed(["experiment=ogmopd", "teachers.temporal=t", *overrides])
    assert _settings(cfg, strategy, DEVICES["h100"]).teachers == teachers
