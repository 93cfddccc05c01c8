"""Teachers score what the student wrote, whatever hosts them, and leave the student alone."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from reframe_vl.mini.model import base_folder
from reframe_vl.policy.loading import LoRASettings, Policy, load_policy
from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.policy.score import score
from reframe_vl.policy.teacher_folders import check_base, check_tokens
from reframe_vl.policy.teachers import FrozenModel, Teachers
from reframe_vl.policy.visual_cache import VisualCache
from reframe_vl.tools.codec import codec_for
from tiny import random_context, sampling, tiny_model, tokenizer

ROUTES = {"image": "spatial", "video": "temporal"}


def contexts(model, count=3):
    rng = np.random.default_rng(0)
    return [random_context(rng, model.view_maker) for _ in range(count)]


def tiny_student(lora=False):
    model = tiny_model("qwen3_vl")
    if lora:
        adapted = get_peft_model(model.model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
        model = VisionLanguageModel(adapted, model.view_maker)
    return model


def log_probs(model, given, how):
    with torch.no_grad():
        return [p.numpy() for p in score(model, given, how).per_context()]


def test_a_frozen_model_gives_the_scores_of_policy_score_without_a_graph():
    student, teacher = tiny_model("qwen3_vl"), tiny_model("qwen3_vl", seed=1)
    given = contexts(student)
    found = FrozenModel(teacher, student).log_probs(given, sampling(0.7))
    for mine, expected in zip(found, log_probs(teacher, given, sampling(0.7)), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-6)


@pytest.mark.parametrize("rows", [400, 352])
def test_c19_rows_that_pad_a_vocabulary_change_nothing(rows):
    student, teacher = tiny_model("qwen3_vl"), tiny_model("qwen3_vl", seed=1)
    named = len(tokenizer())
    assert named < 352 < student.vocab_size < 400
    other = copy.deepcopy(teacher)
    torch.manual_seed(5)
    other.base.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        # Loud rows: they would draw all the probability.
        other.base.lm_head.weight[named:] *= 1000
    assert other.vocab_size == rows
    given = contexts(student)
    found = FrozenModel(other, student).log_probs(given, sampling())
    for mine, expected in zip(found, log_probs(teacher, given, sampling()), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_c19_tokens_that_differ_are_named():
    other = copy.deepcopy(tokenizer())
    other.add_tokens(["<brand-new>"])
    with pytest.raises(ValueError, match="<brand-new>"):
        check_tokens(tokenizer(), other, "spatial")
    check_tokens(tokenizer(), tokenizer(), "spatial")


def test_a_domain_without_a_teacher_is_named():
    teachers = Teachers({"spatial": "x", "temporal": "y"}, ROUTES)
    with pytest.raises(KeyError, match="'audio' has no teacher"):
        teachers.of("audio")
    teachers = Teachers({"spatial": "x", "temporal": None}, ROUTES)
    with pytest.raises(KeyError, match=r"teachers\.temporal=PATH"):
        teachers.of("video")


def test_a_teacher_is_needed_only_where_its_domain_occurs():
    """A domain without one is told of before training, where it is known to occur."""
    student = Policy(tiny_model("qwen3_vl"), tokenizer(), codec_for("qwen3_vl"), "tiny")
    teachers = Teachers({"spatial": str(base_folder(0)), "temporal": None}, {"video": "temporal"})
    teachers.check(student, {})
    with pytest.raises(KeyError, match=r"Domain video .* teachers\.temporal=PATH"):
        teachers.check(student, {"video"})


def spatial(path, hosting="models"):
    """What checking a teacher at a path says; it needs no model."""
    student = load_student()
    with pytest.raises((ValueError, FileNotFoundError)) as told:
        Teachers({"spatial": path}, {"image": "spatial"}, hosting=hosting).check(student)
    return str(told.value)


def load_student():
    return load_policy(base_folder(0), lora=LoRASettings(rank=2))


def test_what_is_wrong_with_a_path_is_told_without_loading_a_model(tmp_path, monkeypatch):
    student = load_student()
    monkeypatch.setattr("reframe_vl.policy.teachers.load_policy", None)
    monkeypatch.setitem(globals(), "load_student", lambda: student)
    nowhere = str(tmp_path / "nowhere")
    assert spatial(nowhere).startswith(f"teachers.spatial={nowhere}: there is no such folder.")
    assert "has no config.json" in spatial(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "hosting=adapters" in spatial(str(tmp_path))
    assert "no adapter_model.safetensors" in spatial(str(tmp_path), "adapters")
    (tmp_path / "config.json").write_text("{}")
    assert "no model.safetensors" in spatial(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert "has no tokenizer.json" in spatial(str(tmp_path))
    (tmp_path / "step_000003.ckpt").touch()
    assert "method=consolidate" in spatial(str(tmp_path / "step_000003.ckpt"))
    with pytest.raises(ValueError, match=r"teachers\.spatial is 5: give the path"):
        Teachers({"spatial": 5}, {"image": "spatial"})


def test_c19_other_tokens_are_told_without_loading_a_model(tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(base_folder(1), folder)
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    vocabulary = settings["model"]["vocab"]
    one, two, *_ = vocabulary
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(settings))
    assert "both need one tokenizer" in spatial(str(folder))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters of the shipped base, and the base with each merged in."""
    merged, folders = {}, {}
    for seed, name in enumerate(("spatial", "temporal")):
        policy = load_policy(base_folder(0), lora=LoRASettings(rank=2))
        torch.manual_seed(seed)
        for key, parameter in policy.model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
        folders[name] = str(tmp_path_factory.mktemp("run") / "policy" / "adapter")
        policy.model.model.save_pretrained(folders[name])
        whole = copy.deepcopy(policy.model.model).merge_and_unload()
        merged[name] = VisionLanguageModel(whole, policy.model.view_maker)
    return folders, merged


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2)], ids=["full", "lora"])
def test_adapters_on_one_base_score_as_merged_models_and_leave_the_student_as_it_was(
    adapters, lora
):
    folders, merged = adapters
    student = load_policy(base_folder(0), lora=lora)
    student.model.visual_cache = VisualCache(16)
    given = contexts(student.model)
    how = student.sampling(1.0, 8)
    before = log_probs(student.model, given, how)
    trained = [n for n, p in student.model.named_parameters() if p.requires_grad]
    # A run's directory will do as well.
    paths = {name: folder.removesuffix("/policy/adapter") for name, folder in folders.items()}
    teachers = Teachers(paths, ROUTES, hosting="adapters")
    teachers.load(student)
    assert teachers.heads_stay
    hosts = {id(teachers.of(domain).host) for domain in ROUTES}
    assert len(hosts) == 1
    assert (id(student.model) in hosts) == (lora is not None)
    for domain, name in ROUTES.items():
        found = teachers.of(domain).log_probs(given, how)
        for mine, expected in zip(found, log_probs(merged[name], given, how), strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-5)
    assert [n for n, p in student.model.named_parameters() if p.requires_grad] == trained
    for mine, expected in zip(log_probs(student.model, given, how), before, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_an_adapter_of_another_model_is_refused(adapters, tmp_path):
    folders, _ = adapters
    other = get_peft_model(tiny_model("qwen3_vl").model, LoraConfig(r=2, target_modules=["q_proj"]))
    other.save_pretrained(tmp_path / "spatial")
    student = load_policy(base_folder(0), lora=LoRASettings(rank=2))
    paths = {"spatial": str(tmp_path / "spatial"), "temporal": folders["temporal"]}
    with pytest.raises((ValueError, RuntimeError)):
        Teachers(paths, ROUTES, hosting="adapters").load(student)


def test_an_adapter_of_another_base_is_refused_and_one_named_default_harms_nobody(
    adapters, tmp_path
):
    folders, _ = adapters
    student = load_policy(base_folder(1), lora=LoRASettings(rank=2))
    with pytest.raises(ValueError, match="was trained on"):
        Teachers(folders, ROUTES, hosting="adapters").load(student)
    student = load_policy(base_folder(0), lora=LoRASettings(rank=2))
    given, how = contexts(student.model), student.sampling(1.0, 8)
    before = log_probs(student.model, given, how)
    paths = {"default": folders["spatial"], "v1.5": folders["temporal"]}
    teachers = Teachers(paths, {"image": "default", "video": "v1.5"}, hosting="adapters")
    teachers.load(student)
    found = teachers.of("image").log_probs(given, how)
    assert any(abs(a - b).max() > 1e-3 for a, b in zip(found, before, strict=True))
    for mine, expected in zip(log_probs(student.model, given, how), before, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_copies_of_a_base_are_one_base(tmp_path):
    places = [tmp_path / place / "base" for place in ("nfs", "scratch")]
    for place in places:
        place.mkdir(parents=True)
    settings = {"base_model_name_or_path": str(places[0])}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    check_base(str(places[1]), tmp_path, "spatial")


@pytest.mark.parametrize("names", [("a/one", "a/two"), ("a/same", "b/same")])
def test_a_teachers_base_is_told_from_another_runs_policy(tmp_path, names):
    one, two = (tmp_path / run / "policy" for run in names)
    settings = {"base_model_name_or_path": str(one)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    # By name, while neither of them is here.
    for make in (False, True):
        for folder in (one, two) if make else ():
            folder.mkdir(parents=True)
        check_base(str(one), tmp_path, "spatial")
        with pytest.raises(ValueError, match=f"was trained on {one}, the student's base is {two}"):
            check_base(str(two), tmp_path, "spatial")


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("which", ["spatial", "temporal"], ids=["first", "later"])
@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda n, _: n.replace("language_model.", ""), "lacks weights that its settings promise"),
        (lambda n, i: n if "lora_A" in n or i % 4 < 2 else None, "lacks weights"),
        (lambda n, i: n if i else [n, n.replace("layers.0", "layers.9")], "has weights that the"),
    ],
    ids=["old_prefix", "half_of_b", "more"],
)
def test_f13_an_adapter_that_fits_in_part_or_not_at_all_is_refused(
    adapters, tmp_path, lora, which, damage, words
):
    folders = dict(adapters[0])
    damaged = tmp_path / which
    shutil.copytree(folders[which], damaged)
    file, kept = damaged / "adapter_model.safetensors", {}
    for at, (name, tensor) in enumerate(sorted(load_file(file).items())):
        names = damage(name, at)
        for new in names if isinstance(names, list) else [names]:
            if new is not None:
                kept[new] = tensor.clone()
    save_file(kept, file, {"format": "pt"})
    student = load_policy(base_folder(0), lora=lora)
    with pytest.raises(ValueError, match=f"teacher {which} in {damaged} {words}"):
        Teachers(folders | {which: str(damaged)}, ROUTES, hosting="adapters").load(student)


def test_a_teacher_in_single_precision_computes_in_it_inside_mixed_precision():
    student, teacher = tiny_model("qwen3_vl"), tiny_model("qwen3_vl", seed=1)
    given = contexts(student)
    exact = FrozenModel(teacher, student).log_probs(given, sampling())
    with torch.autocast("cpu", torch.bfloat16):
        found = FrozenModel(teacher, student).log_probs(given, sampling())
    for mine, expected in zip(found, exact, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(
    ("paths", "settings", "words"),
    [
        ({"v1.5": "a", "v1_5": "b"}, {}, "v1.5 and v1_5 would be one adapter"),
        ({"spatial": "a"}, {"dtype": "float32"}, "teachers.dtype=float32 is of whole models"),
    ],
)
def test_settings_of_adapters_that_cannot_be_had_are_refused(paths, settings, words):
    routes = {f"domain {name}": name for name in paths}
    with pytest.raises(ValueError, match=re.escape(words)):
        Teachers(paths, routes, hosting="adapters", **settings).check(load_student())


def test_adapters_are_never_moved_so_their_heads_stay_with_offload_too():
    routes = {"image": "spatial"}
    assert Teachers({"spatial": "a"}, routes, hosting="adapters", offload=True).heads_stay
    assert not Teachers({"spatial": "a"}, routes, offload=True).heads_stay
