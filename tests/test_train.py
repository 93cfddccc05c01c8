"""The main job from its config to its results, in this process."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reframe_vl.evaluating import evaluate_checkpoint, load_checkpoint
from reframe_vl.mini.model import base_folder
from reframe_vl.policy.score import score
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import IDENTITY, ConfigError, check, register_resolvers
from reframe_vl.training import train
from reframe_vl.types import CallStatus, Provenance

CONFIGS = Path(__file__).parents[1] / "configs"
register_resolvers()


def composed(run, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [f"paths.run_dir={run}", "num_threads=1", *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the default experiment from a shipped base."""
    run = tmp_path_factory.mktemp("run")
    cfg = composed(
        run,
        "experiment=gdgrpo_spatial",
        "steps=3",
        "trainer.accumulate_grad_batches=2",
        "data.evaluation_size=16",
        "evaluation.every=3",
        "evaluation.items=8",
        "callbacks.rollout_log.pictures_every=1",
        "callbacks.checkpoint.every=3",
    )
    return run, cfg, train(cfg)


def test_a_run_leaves_what_the_documentation_promises(finished):
    run, _, report = finished
    assert json.loads((run / "results.json").read_text()) == report
    arms = {"tools", "no_tools", "dropped", "conflict", "true", "random", "blank"}
    assert arms <= set(report["accuracy"])
    measures = {"tool_gain", "tool_gain_vs_base", "gain", "harm", "observation_dependence"}
    for entry in [report["accuracy"]["tools"], *(report[name] for name in measures)]:
        assert entry.keys() == {"value", "low", "high"}
        assert entry["low"] <= entry["value"] <= entry["high"]
    assert report["items"] == 16
    assert report["base"]["accuracy"]["tools"]["value"] >= 0
    steps = [json.loads(line)["step"] for line in (run / "curve.jsonl").open()]
    assert steps == [0, 3]
    assert OmegaConf.load(run / "config.yaml").steps == 3


def test_tensorboard_has_components_pictures_and_transcripts(finished):
    board = EventAccumulator(str(finished[0] / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    wanted = {
        "rollouts/reward",
        "rollouts/reward/answer",
        "rollouts/reward/grounding",
        "rollouts/reward/call",
        "rollouts/reward/penalty",
        "rollouts/call_rate",
        "rollouts/parse_rate",
        "rollouts/dead_groups",
        "reward_weight/call",
        "train/entropy",
        "train/sampler_gap_max",
        "health/alarm",
        "val/accuracy/tools",
    }
    assert wanted <= set(tags["scalars"])
    assert "rollouts/0" in tags["images"]
    assert len(board.Scalars("rollouts/reward")) == 3


def test_every_rollout_reads_back_and_its_logprobs_are_the_trainers(finished):
    run, cfg, _ = finished
    store = RolloutStore(run / "rollouts")
    assert store.steps() == [0, 1, 2]
    # The first step's sampler was the base itself.
    from hydra.utils import instantiate

    base = instantiate(cfg.model)
    groups = store.read(0)
    rollouts = [r for g in groups for r in g.rollouts]
    assert len(rollouts) == 16 * 8
    # Several turns, drops and refused calls are all among them.
    assert max(r.num_turns for r in rollouts) > 1
    assert any(r.dropped for r in rollouts)
    assert any(c.status is CallStatus.REFUSED for r in rollouts for c in r.calls)
    contexts = [c for r in rollouts for c in r.contexts]
    with base.model.inference():
        found = score(base.model, contexts, rollouts[0].sampling).logprobs_T
    sampled = [
        value
        for context in contexts
        for span in context.spans
        if span.provenance is Provenance.SAMPLED and not span.carried
        for value in span.logprobs
    ]
    torch.testing.assert_close(found, torch.tensor(sampled), atol=1e-4, rtol=0)


def test_checkpoints_of_all_three_kinds_load_as_the_same_policy(finished):
    run, cfg, _ = finished
    [checkpoint] = (run / "checkpoints").glob("*.ckpt")
    weights = [
        dict(load_checkpoint(cfg, path).model.named_parameters())
        for path in (run, run / "policy", checkpoint)
    ]
    for name, parameter in weights[0].items():
        assert torch.equal(parameter, weights[1][name]), name
        assert torch.equal(parameter, weights[2][name]), name
    with pytest.raises(FileNotFoundError, match="run directory"):
        load_checkpoint(cfg, run / "nothing")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data=mini_video", "evaluation.base=false"], [".mini_image_data; this evaluates on"]),
        (["base=1"], ["assets/base_2; beside it stands"]),
        (["base=1", "evaluation.base=false"], []),
        ([], []),
    ],
)
def test_a_run_that_is_evaluated_on_other_data_or_beside_another_base_is_named(
    finished, tmp_path, caplog, overrides, told
):
    few = ["data.evaluation_size=2", "evaluation.arms=[tools]", "num_threads=1"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        here = [f"ckpt={finished[0]}", f"paths.run_dir={tmp_path}"]
        cfg = compose("eval", [*here, *few, *overrides])
    evaluate_checkpoint(cfg)
    warnings = [r.getMessage() for r in caplog.records if "was trained" in r.getMessage()]
    assert len(warnings) == len(told)
    assert all(words in warning for words, warning in zip(told, warnings, strict=True))


def distillation(run, *overrides):
    few = ["steps=1", "prompts_per_step=2", "rollouts_per_prompt=2", "evaluate=false"]
    return composed(run, "experiment=ogmopd", *few, "evaluation.every=0", *overrides)


@pytest.mark.parametrize(
    "teachers, words",
    [
        (["teachers.spatial=nowhere"], r"^teachers\.spatial=nowhere: there is no such folder"),
        (["teachers.spatial=5"], r"^algorithm\.teachers: teachers\.spatial is 5: give the path"),
        ([], r"^Domain image is taught by spatial, which has no checkpoint"),
    ],
    ids=["nowhere", "number", "none"],
)
def test_a_wrong_teacher_is_told_in_a_sentence_before_the_run_takes_its_directory(
    tmp_path, teachers, words
):
    given = [f"teachers.temporal={base_folder(2)}", *teachers]
    with pytest.raises(ConfigError, match=words):
        train(distillation(tmp_path / "run", *given))
    assert not (tmp_path / "run" / IDENTITY).exists()


def test_a_domain_that_does_not_occur_needs_no_teacher(tmp_path):
    given = [f"teachers.spatial={base_folder(1)}", "+teachers.unrouted=http://127.0.0.1:9"]
    assert train(distillation(tmp_path / "run", "data=mini_image", *given)) == {}
    assert (tmp_path / "run" / IDENTITY).exists()


@pytest.mark.parametrize("adapters", [False, True])
def test_weights_in_half_precision_keep_updates_that_are_smaller_than_their_rounding(
    tmp_path, adapters
):
    cfg = composed(
        tmp_path,
        "+model.dtype=bfloat16",
        "+model.freeze_vision=true",
        *(["model.lora={_target_:reframe_vl.policy.loading.LoRASettings}"] if adapters else []),
        "trainer.precision=bf16-mixed",
        "lr=1e-6",
        "warmup_updates=0",
        "steps=1",
        "prompts_per_step=2",
        "rollouts_per_prompt=4",
        "evaluation.every=0",
        "data.evaluation_size=4",
    )
    train(cfg)
    [checkpoint] = (tmp_path / "checkpoints").glob("*.ckpt")
    trained = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert trained and all("visual" not in name for name in trained)
    moved = 0
    start = instantiate(cfg.model).model.state_dict()
    for name, value in trained.items():
        assert value.dtype is torch.float32
        if not adapters:
            change = (value - start[name.removeprefix("policy.")].float()).abs()
            moved += int((change > 0).sum())
            assert change.max() <= 1.1e-6
    assert adapters or moved > 1000
    with safe_open(tmp_path / "policy" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_precision_that_rounds_updates_away_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="take bf16-mixed"):
        train(composed(tmp_path, "trainer.precision=bf16-true"))


def test_precisions_go_by_lightnings_older_names_too(tmp_path):
    check(composed(tmp_path, "+model.dtype=bfloat16", "trainer.precision=bf16"))
    check(composed(tmp_path, "+model.dtype=float16", "trainer.precision=16"))
    with pytest.raises(ConfigError, match="set trainer\\.precision=bf16-mixed"):
        check(composed(tmp_path, "+model.dtype=bfloat16", "trainer.precision=16"))
