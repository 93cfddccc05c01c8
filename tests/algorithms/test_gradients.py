"""The gradient of a step, against slow references and over micro-batches and ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from one_step import assert_same, fixed_groups, gradient
from reframe_vl.algorithms.gdgrpo import GRPOSettings
from tiny import sampling, tiny_model

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def whole():
    return gradient(micro=1)


def per_token_gradient(subgroups=True):
    """Straight from the formulas: one context, one token at a time, with transformers' forward."""
    model, how = tiny_model("qwen3_vl"), sampling()
    groups = fixed_groups(model, how)
    losses, tokens = [], 0
    for group in groups:
        for rollout in group.rollouts:
            if rollout.reward is None:
                continue
            peers = [
                r.reward
                for r in group.rollouts
                if r.reward is not None
                and (not subgroups or r.drop_assigned == rollout.drop_assigned)
            ]
            mean = sum(peers) / len(peers)
            std = (sum((p - mean) ** 2 for p in peers) / len(peers)) ** 0.5
            advantage = 0.0 if len(peers) < 2 else (rollout.reward - mean) / (std + 1e-4)
            for context in rollout.contexts:
                row = model.expand(context)
                ids = torch.from_numpy(row.token_ids)[None]
                logits = model.base(
                    input_ids=ids,
                    pixel_values=torch.from_numpy(
                        model.view_maker.patches([v for _, v in row.blocks])
                    ),
                    image_grid_thw=torch.tensor([v.grid_thw for _, v in row.blocks]),
                    mm_token_type_ids=torch.from_numpy(row.image_mask).int()[None],
                ).logits[0]
                for position in row.trained.tolist():
                    allowed = logits[position - 1].clone()
                    allowed[list(how.banned_ids)] = float("-inf")
                    logprob = allowed.log_softmax(-1)[ids[0, position]]
                    losses.append(-advantage * logprob)
                    tokens += 1
    (torch.stack(losses).sum() / tokens).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def test_the_gradient_equals_per_token_loops_written_from_the_formulas(whole):
    assert_same(whole, per_token_gradient(), 2e-6)


def test_whole_group_advantages_equal_per_token_loops():
    assert_same(gradient(1, GRPOSettings(subgroups=False)), per_token_gradient(False), 2e-6)


@pytest.mark.parametrize("micro", [2, 3, 8])
def test_c05_c06_c08_micro_batches_add_up_to_one_big_batch_empty_ones_included(whole, micro):
    assert_same(gradient(micro), whole)


@pytest.mark.parametrize("micro", [1, 3])
def test_two_gloo_ranks_have_the_gradient_of_one_big_batch(whole, tmp_path, micro):
    out = tmp_path / "gradient.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    done = subprocess.run(
        [*command, str(TESTS / "one_step.py"), f"--micro={micro}", f"--out={out}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert_same(torch.load(out), whole)


@pytest.mark.parametrize("weights", ["sequence", "constant"])
def test_other_normalisers_also_add_up_over_micro_batches(weights):
    settings = GRPOSettings(weights=weights, max_tokens=20)
    assert_same(gradient(3, settings), gradient(1, settings))


def test_a_reference_policy_pulls_on_rollouts_without_advantage_too():
    pulled = gradient(2, GRPOSettings(kl_coef=0.5))
    # At the initial policy the k3 penalty and its gradient are zero.
    assert_same(pulled, gradient(1), 2e-6)
