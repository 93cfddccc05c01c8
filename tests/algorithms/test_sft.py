import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer

from one_step import SGD, assert_same, fit, fixed_groups, tiny_policy
from reframe_vl.algorithms.sft import SFT, SFTSettings
from reframe_vl.callbacks.recorded_rollouts import Keep, RecordedRolloutsCallback
from reframe_vl.data.report import RecordError
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.runs import register_resolvers
from reframe_vl.training import train
from reframe_vl.types import Context, Provenance, Span, Termination
from tiny import sampling, tokenizer, view_maker

CONFIGS = Path(__file__).parents[2] / "configs"
ALL = ("external", "injected", "sampled")
register_resolvers()


def mixed_groups(model, how):
    """Groups with turns of every trainable provenance, and a branch."""
    groups = fixed_groups(model, how, num_groups=4, size=3)
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            rollout.num_turns = 1
            for context in rollout.contexts:
                context.spans = [
                    dataclasses.replace(span, provenance=Provenance(ALL[(number + at) % 3]))
                    if span.trained
                    else span
                    for at, span in enumerate(context.spans)
                ]
    rollout = groups[0].rollouts[0]
    shown = [dataclasses.replace(span, carried=True) for span in rollout.contexts[0].spans]
    call = Span(Provenance.INJECTED, (40, 41, 42))
    rollout.branches = [Context([*shown, call])]
    return groups


def gradient(micro, settings=None):
    policy = tiny_policy()
    module = SFT(settings, policy=policy, optimizer=SGD)
    return fit(module, mixed_groups(policy.model, sampling()), micro)


def per_token_gradient(provenances, weights="token"):
    """Straight from the formula: one context, one token at a time, with transformers' forward."""
    policy = tiny_policy()
    model, banned = policy.model, list(policy.sampling(1.0, 1).banned_ids)
    rollouts = [r for g in mixed_groups(model, sampling()) for r in g.rollouts]
    means, losses, tokens = [], [], 0
    for rollout in rollouts:
        own = []
        for context in (*rollout.contexts, *rollout.branches):
            row = model.expand(context)
            ids = torch.from_numpy(row.token_ids)[None]
            logits = model.base(
                input_ids=ids,
                pixel_values=torch.from_numpy(model.view_maker.patches([v for _, v in row.blocks])),
                image_grid_thw=torch.tensor([v.grid_thw for _, v in row.blocks]),
                mm_token_type_ids=torch.from_numpy(row.image_mask).int()[None],
            ).logits[0]
            whose = [s.provenance for s in context.spans if s.trained for _ in s.token_ids]
            for position, provenance in zip(row.trained.tolist(), whose, strict=True):
                if provenance not in provenances:
                    continue
                allowed = logits[position - 1].clone()
                allowed[banned] = float("-inf")
                own.append(-allowed.log_softmax(-1)[ids[0, position]])
        if own:
            means.append(torch.stack(own).mean())
        losses += own
        tokens += len(own)
    loss = torch.stack(losses).sum() / tokens if weights == "token" else torch.stack(means).mean()
    loss.backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("provenances", "weights"), [(ALL, "token"), (("injected",), "token"), (ALL, "sequence")]
)
def test_the_gradient_equals_per_token_loops_written_from_the_formula(provenances, weights):
    settings = SFTSettings(provenances, weights)
    assert_same(gradient(1, settings), per_token_gradient(provenances, weights), 2e-6)


@pytest.mark.parametrize("micro", [3, 6])
def test_micro_batches_add_up_to_one_big_batch_empty_ones_included(micro):
    assert_same(gradient(micro), gradient(1))


@pytest.mark.parametrize("provenances", [(), ("prompt",), ("sampled", "invented")])
def test_provenances_that_cannot_be_trained_are_refused(provenances):
    with pytest.raises(ValueError, match="external, injected, sampled"):
        SFTSettings(provenances)


# ------------------------------------------------------------------ recorded rollouts


def record(run, groups, step=0, decode=None):
    store = RolloutStore(run / "rollouts")
    store.write(step, groups, decode or Encoder(tokenizer()).decode)
    return run


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture
def groups(policy):
    return mixed_groups(policy.model, sampling())


@pytest.fixture(scope="module")
def run(tmp_path_factory, policy):
    """A run with all groups in one file; not to be written to."""
    return record(tmp_path_factory.mktemp("run"), mixed_groups(policy.model, sampling()))


class FakeTrainer(Trainer):
    global_rank, world_size, lightning_module = 0, 1, None

    def __init__(self, module, rank=0, ranks=1, steps=8):
        super().__init__(accelerator="cpu", logger=False, barebones=True, max_epochs=steps)
        self.lightning_module, self.global_rank, self.world_size = module, rank, ranks


def connected(policy, callback, **trainer):
    module = SFT(policy=policy, optimizer=SGD)
    callback.setup(FakeTrainer(module, **trainer), module, "fit")
    return module.loader.generate


def names(groups):
    return [group.sample.id for group in groups]


def recorded(run, prompts_per_step=2, keep=None, **options):
    return RecordedRolloutsCallback([run], keep or Keep(ALL), prompts_per_step, **options)


def test_contexts_are_read_back_exactly_as_they_were(run, policy, groups):
    generate = connected(policy, recorded(run, len(groups)))
    written = {r.key: r for g in groups for r in g.rollouts if r.reward is not None}
    read = {r.key: r for g in generate() for r in g.rollouts}
    assert read.keys() == written.keys()
    for key, rollout in read.items():
        assert (rollout.contexts, rollout.branches) == (
            written[key].contexts,
            written[key].branches,
        )
        for context, original in zip(rollout.contexts, written[key].contexts, strict=True):
            for view, shown in zip(context.views, original.views, strict=True):
                assert (view.pixels == shown.pixels).all()


def test_every_pass_serves_every_group_once_in_an_order_of_its_own(run, policy, groups):
    generate = connected(policy, recorded(run, 2, seed=1))
    passes = [names(generate()) + names(generate()) for _ in range(4)]
    assert all(sorted(served) == names(groups) for served in passes)
    assert len(set(map(tuple, passes))) > 1


def test_a_resumed_run_is_served_what_an_undisturbed_one_is(run, policy):
    first = recorded(run, 3)
    generate = connected(policy, first)
    generate()
    state = json.loads(json.dumps(first.state_dict()))
    resumed = recorded(run, 3)
    again = connected(policy, resumed)
    resumed.load_state_dict(state)
    for _ in range(2):
        assert names(again()) == names(generate())


def test_a_checkpoint_of_other_rollouts_is_refused(run):
    state = recorded(run).state_dict()
    recorded(run, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"keep\."):
        recorded(run, keep=Keep(("injected",))).load_state_dict(state)


def test_ranks_share_a_step(run, policy):
    alone = connected(policy, recorded(run, 3))
    ranks = [connected(policy, recorded(run, 3), rank=r, ranks=2) for r in range(2)]
    for _ in range(2):
        step = names(alone())
        assert [names(rank()) for rank in ranks] == [step[::2], step[1::2]]


def test_only_rollouts_that_are_asked_for_are_kept(tmp_path, policy, groups):
    rollouts = [r for g in groups for r in g.rollouts]
    rollouts[0].termination = Termination.ERROR
    rollouts[1].termination = Termination.MAX_TURNS
    rollouts[2].reward = None
    for number, rollout in enumerate(rollouts[3:]):
        rollout.reward = float(number)
    rollouts[3].reward = float("nan")
    record(tmp_path, groups)
    record(tmp_path, groups[1:2], step=1)

    def kept(prompts=1, **options):
        callback = recorded(tmp_path, prompts, Keep(**{"provenances": ALL} | options))
        generate = connected(policy, callback)
        served = [generate() for _ in range(len(callback.groups))]
        assert callback.groups.num_rollouts + callback.groups.left_out.total() == (
            3 if "first_step" in options else 15
        )
        return sorted((r.key.sample_id, r.key.index) for [g] in served for r in g.rollouts)

    def those(chosen):
        every = [*rollouts, *groups[1].rollouts]
        return sorted((r.key.sample_id, r.key.index) for r in every if chosen(r))

    fine = [id(r) for r in rollouts[3:]]
    assert kept() == those(lambda r: id(r) in fine)
    assert kept(answered=False) == those(lambda r: r is rollouts[1] or id(r) in fine)
    assert kept(scorable=False) == those(lambda r: r is rollouts[2] or id(r) in fine)
    assert kept(min_reward=4.0) == those(lambda r: id(r) in fine and (r.reward or 0) >= 4)
    assert kept(first_step=1) == sorted((r.key.sample_id, r.key.index) for r in groups[1].rollouts)

    def has_external(rollout):
        spans = [s for c in rollout.contexts for s in c.spans]
        return any(s.provenance is Provenance.EXTERNAL for s in spans)

    assert kept(provenances=("external",)) == those(lambda r: id(r) in fine and has_external(r))


def test_rollouts_of_another_tokenizer_are_refused_at_the_start(tmp_path, policy, groups):
    record(tmp_path, groups, decode=lambda ids: " ".join(map(str, ids)))
    with pytest.raises(RecordError, match=r"line 1: .*another tokenizer"):
        connected(policy, recorded(tmp_path))


def test_rollouts_of_a_family_with_other_patches_are_refused_at_the_start(run):
    other = tiny_policy()
    other.model.view_maker = view_maker(patch=16)
    with pytest.raises(RecordError, match="another model family"):
        connected(other, recorded(run))


def test_a_missing_image_of_any_kept_rollout_is_told_at_the_start(tmp_path, groups):
    run = record(tmp_path / "run", groups)
    last = groups[-1].rollouts[-1].contexts[-1].views[-1].hash
    [image] = (run / "rollouts").rglob(f"{last}.png")
    image.rename(tmp_path / image.name)
    with pytest.raises(RecordError, match=rf"step_.*: the image .*{last}.png is missing"):
        recorded(run, 1)
    # Elsewhere through a link they are there too.
    (tmp_path / image.name).rename(image)
    (run / "rollouts" / "images").rename(tmp_path / "images")
    (run / "rollouts" / "images").symlink_to(tmp_path / "images")
    recorded(run, 1)


def test_fewer_groups_than_a_step_takes_are_an_error_that_names_the_folder(tmp_path, groups):
    groups[0].rollouts[0].termination = Termination.MAX_TURNS
    record(tmp_path, groups)
    with pytest.raises(ValueError, match=r"4 groups .*=5.* 1 not answered") as error:
        recorded(tmp_path, 5)
    assert str(tmp_path / "rollouts") in str(error.value)


def test_a_folder_without_rollouts_and_no_folder_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        recorded(tmp_path)
    with pytest.raises(ValueError, match="rollouts="):
        RecordedRolloutsCallback([], Keep(ALL), 1)


@pytest.mark.parametrize(("passes", "steps"), [(1, 2), (3, 6), (9, 8), (None, 8)])
def test_passes_bound_the_steps(run, policy, passes, steps):
    module = SFT(policy=policy, optimizer=SGD)
    trainer = FakeTrainer(module, steps=8)
    recorded(run, 2, passes=passes).setup(trainer, module, "fit")
    assert trainer.max_epochs == steps


# ------------------------------------------------------------------ from the command's settings


def composed(run, *overrides):
    small = ["num_threads=1", "prompts_per_step=2", "rollouts_per_prompt=2", "evaluate=false"]
    small += ["evaluation.every=0", f"paths.run_dir={run}"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [*small, *overrides])


def test_a_run_that_stopped_goes_on_bit_for_bit_with_the_rollouts_of_two_runs(tmp_path):
    sources = [tmp_path / "source", tmp_path / "ranked"]
    train(composed(sources[0], "steps=1", "data=mini_mixed"))
    # As a run on several ranks leaves them.
    ranked = sources[1] / "rollouts"
    ranked.mkdir(parents=True)
    (ranked / "rank_0").symlink_to(sources[0] / "rollouts")
    settings = ["experiment=sft", f"rollouts=[{sources[0]},{sources[1]}]", "keep.answered=false"]
    settings += ["trainer.accumulate_grad_batches=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(composed(whole, *settings, "steps=2"))
    train(composed(parts, *settings, "steps=1"))
    before = (parts / "policy" / "model.safetensors").read_bytes()
    train(composed(parts, *settings, "steps=2", f"resume={parts}"))
    after = (parts / "policy" / "model.safetensors").read_bytes()
    assert after == (whole / "policy" / "model.safetensors").read_bytes() != before
    assert not (whole / "rollouts").exists()
