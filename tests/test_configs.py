"""Every shipped experiment composes, and is instantiated, at every scale."""

import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from reframe_vl.algorithms.module import PolicyModule
from reframe_vl.mini.model import base_folder
from reframe_vl.mini.world import MiniWorld
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.types import (
    Context,
    Modality,
    Provenance,
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sampling,
    Span,
    Termination,
)

CONFIGS = Path(__file__).parents[1] / "configs"
EXPERIMENTS = sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml"))
SCALES = sorted(p.stem for p in (CONFIGS / "scale").glob("*.yaml"))


def needs_sandbox(experiment):
    return pytest.param(
        experiment,
        marks=pytest.mark.skipif(
            shutil.which("bwrap") is None,
            reason="bubblewrap is not installed (apt-get install bubblewrap)",
        ),
    )


STARTED = [needs_sandbox(e) if "pyvision" in e else e for e in EXPERIMENTS]
"""Experiments whose tools and callbacks are made."""

register_resolvers()


def composed(*overrides, run="unused"):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [*overrides, f"paths.run_dir={run}"])


def recorded(run):
    """What it takes to learn from one rollout of an earlier run."""
    context = Context([Span(Provenance.SAMPLED, (1,))])
    key = RolloutKey(0, 0, "a", 0)
    rollout = Rollout(key, [context], Sampling(), Termination.ANSWERED, reward=1.0)
    groups = [RolloutGroup(MiniWorld().sample("test", 0), [rollout])]
    RolloutStore(run / "rollouts").write(0, groups, str)
    return [f"rollouts=[{run}]", "prompts_per_step=1"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_resolves_at_every_scale(experiment, scale):
    cfg = composed(f"experiment={experiment}", f"scale={scale}")
    assert cfg.experiment_name == experiment
    assert isinstance(cfg.lr, float)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert not OmegaConf.missing_keys(OmegaConf.create(resolved))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("experiment", STARTED)
def test_every_experiment_is_instantiated_at_every_scale(experiment, scale, tmp_path):
    teachers = ["teachers.spatial=a", "teachers.temporal=b"]
    cfg = composed(
        f"experiment={experiment}",
        f"scale={scale}",
        *(teachers if "mopd" in experiment else []),
        *(recorded(tmp_path / "earlier") if experiment == "sft" else []),
        *([f"auxiliaries={{a:{{checkpoint:{base_folder(0)}}}}}"] if "ekipl" in experiment else []),
        # The full-size model, data and accelerator are not at hand; what reads them is the same.
        "model=mini",
        "data=mini_image",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        run=tmp_path,
    )
    callbacks = [instantiate(node) for node in cfg.callbacks.values() if node is not None]
    assert all(isinstance(callback, Callback) for callback in callbacks)
    loggers = [instantiate(node) for node in cfg.logger.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    module = instantiate(cfg.algorithm)(policy=instantiate(cfg.model))
    assert isinstance(module, PolicyModule)
    assert trainer.max_epochs == cfg.steps


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_its_embedded_data(experiment):
    data = instantiate(composed(f"experiment={experiment}", "data.evaluation_size=4").data)
    modalities = {
        Modality.VIDEO if "temporal" in experiment or "video" in experiment else Modality.IMAGE
    }
    if "mopd" in experiment or "mix" in experiment or experiment == "sft":
        modalities = set(Modality)
    for samples in (data.coming_samples(4), data.evaluation_samples(), data.conflict_samples()):
        assert {sample.modality for sample in samples} == modalities


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_can_train_on_images_and_videos(experiment):
    cfg = composed(f"experiment={experiment}", "data=mini_mixed", "data.evaluation_size=4")
    data = instantiate(cfg.data)
    for samples in (data.coming_samples(16), data.evaluation_samples(), data.conflict_samples()):
        assert {sample.modality for sample in samples} == set(Modality)


@pytest.mark.parametrize(
    ("method", "baseline"),
    [("gdgrpo_spatial", "grpo_outcome"), ("gdgrpo_temporal", "grpo_outcome_temporal")],
)
def test_the_baseline_differs_from_the_method_in_drop_reward_and_subgroups_only(method, baseline):
    def without_names(cfg):
        flat = {}

        def walk(node, path=""):
            if isinstance(node, dict):
                for key, value in node.items():
                    walk(value, f"{path}.{key}")
            else:
                flat[path] = node

        walk(OmegaConf.to_container(cfg, resolve=True))
        return flat

    method = without_names(composed(f"experiment={method}"))
    baseline = without_names(composed(f"experiment={baseline}"))
    different = {k for k in method if method[k] != baseline.get(k)}
    assert {k for k in different if not k.startswith((".callbacks", ".experiment_name"))} == {
        ".drop",
        ".reward.call",
        ".reward.grounding",
        ".algorithm.settings.subgroups",
    }


def test_ablation_switches_reach_the_code():
    cfg = composed("drop=0", "reward.grounding=0", "reward.call=0", "algorithm=grpo")
    assert instantiate(cfg.callbacks.ground_drop).schedule(0.5) == 0
    weights = instantiate(cfg.callbacks.evidence_reward).weights
    assert (weights.grounding, weights.call) == (0, 0)
    assert not cfg.algorithm.settings.subgroups


@pytest.mark.parametrize("schedule, value", [("constant", 0.5), ("linear", 0.25), ("cosine", 0.25)])
def test_drop_schedules_are_chosen_by_name(schedule, value):
    cfg = composed(f"callbacks/ground_drop={schedule}")
    assert instantiate(cfg.callbacks.ground_drop).schedule(0.5) == pytest.approx(value)


@pytest.mark.parametrize(
    "override, node, words",
    [
        ("rollouts_per_prompt=0", "callbacks.rollout", "at least 1"),
        ("temperature=0", "callbacks.rollout", "above 0"),
        ("limits.max_turns=0", "callbacks.rollout", "at least 1"),
        ("limits.max_new_tokens=0", "callbacks.rollout", "at least 1"),
        ("drop=1.5", "callbacks.ground_drop", "between 0 and 1"),
        ("algorithm.settings.updates=0", "algorithm.settings", "at least 1"),
        ("algorithm.settings.weights=constant", "algorithm.settings", "max_tokens"),
        ("reward.validity.truncated=-1", "callbacks.evidence_reward", "0 or more"),
    ],
)
def test_c02_values_that_cannot_work_are_errors_at_the_start(override, node, words):
    cfg = composed(override)
    with pytest.raises(InstantiationException, match=words):
        instantiate(OmegaConf.select(cfg, node))
