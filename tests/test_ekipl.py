"""Vision-EKIPL by the entry point's own function."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import CompactHydraException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reframe_vl.evaluating import load_checkpoint
from reframe_vl.mini.model import base_folder
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train
from reframe_vl.types import Provenance

CONFIGS = Path(__file__).parents[1] / "configs"
register_resolvers()


def composed(run, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(
            "train",
            [
                "experiment=vision_ekipl",
                f"paths.run_dir={run}",
                f"paths.log_dir={run}/logs",
                "num_threads=1",
                *overrides,
            ],
        )


def test_two_steps_with_a_local_auxiliary_train_on_a_mixed_pool(tmp_path):
    cfg = composed(
        tmp_path,
        f"auxiliaries={{good:{{checkpoint:{base_folder(1)}}}}}",
        "steps=2",
        "prompts_per_step=4",
        "rollouts_per_prompt=4",
        "kept_rollouts=4",
        "trainer.accumulate_grad_batches=2",
        "evaluation.every=0",
        "evaluation.base=false",
        "evaluation.arms=[tools]",
        "data.evaluation_size=4",
        "evaluation.pass_at_k.samples=4",
        "evaluation.pass_at_k.items=2",
    )
    report = train(cfg)
    assert list(report["pass_at_k"]) == ["1", "2", "4"]
    assert json.loads((tmp_path / "results.json").read_text()) == report
    store = RolloutStore(tmp_path / "rollouts")
    assert store.steps() == [0, 1]
    groups = [group for step in (0, 1) for group in store.read(step)]
    for group in groups:
        assert [r.key.author for r in group.rollouts] == [""] * 4 + ["good"] * 4
        kept = [r for r in group.rollouts if r.advantage is not None]
        left = [r for r in group.rollouts if r.advantage is None]
        assert len(kept) == 4
        assert min(r.reward for r in kept) >= max(r.reward for r in left) - 1e-6
    written = {
        r.key.author: {s.provenance for c in r.contexts for s in c.spans if s.trained}
        for group in groups
        for r in group.rollouts
    }
    assert written == {"": {Provenance.SAMPLED}, "good": {Provenance.EXTERNAL}}
    trained = load_checkpoint(cfg, tmp_path).model.state_dict()
    before = load_checkpoint(cfg, base_folder(cfg.base)).model.state_dict()
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    wanted = {
        "selection/own_share",
        "selection/zero_variance",
        "train/kl",
        "rollouts/auxiliary/good/reward",
        "auxiliary/good/cost",
    }
    assert wanted <= set(board.Tags()["scalars"])
    # The second step's policy has left the reference; KL is of the policy's own tokens.
    assert 0 < board.Scalars("train/kl_tokens")[1].value < board.Scalars("train/tokens")[1].value


def test_an_experiment_without_an_auxiliary_says_how_to_name_one(tmp_path):
    with pytest.raises(CompactHydraException, match="auxiliaries="):
        train(composed(tmp_path))
