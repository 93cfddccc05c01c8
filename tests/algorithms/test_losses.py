import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reframe_vl.algorithms.losses import (
    LOG_RATIO_BOUND,
    kl_penalty,
    locate_outliers,
    nll_loss,
    policy_gradient_loss,
    token_weights,
)

NAN, INF = float("nan"), float("inf")
CLIP_LOW, CLIP_HIGH, CAP, BAND = 0.2, 0.28, 1.5, (0.5, 2.0)
MODES = ["none", "truncated", "masked"]
seeds = st.integers(0, 2**31)


def surrogate(logprobs, old, sampler, advantages, weights, importance="none"):
    return policy_gradient_loss(
        logprobs,
        old,
        sampler,
        advantages,
        weights,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        importance=importance,
        importance_cap=CAP,
        importance_band=BAND,
    )


def leaf(values) -> Tensor:
    return torch.as_tensor(values).detach().clone().requires_grad_()


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, logprobs)
    return grad


def random_tokens(seed: int, num_tokens: int) -> dict[str, Tensor]:
    """Plausible tokens of which some are idle, some lack a sampler log-prob, some are far off."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=g)

    def chance(share: float) -> Tensor:
        return torch.rand(num_tokens, generator=g) < share

    logprobs = -torch.rand(num_tokens, generator=g) * 3 - 0.1
    old = logprobs + normal(0.3)
    return {
        "logprobs": logprobs,
        "old": old,
        "sampler": torch.where(chance(0.2), NAN, old + normal(0.6)),
        "advantages": torch.where(chance(0.1), 0.0, normal(1.0)),
        "weights": torch.where(chance(0.2), 0.0, torch.rand(num_tokens, generator=g) + 0.01),
    }


# ------------------------------------------------------------------- slow references, in float64


def slow_surrogate(logprobs, old, sampler, advantages, weights, importance):
    total = logprobs.sum() * 0.0
    for t in range(len(logprobs)):
        w, a, s = (float(x[t]) for x in (weights, advantages, sampler))
        if w == 0:
            continue
        before = float((logprobs if old is None else old)[t].detach())
        c = 1.0 if math.isnan(s) else math.exp(before - s)
        if importance == "none":
            c = 1.0
        elif importance == "truncated":
            c = min(c, CAP)
        elif not BAND[0] <= c <= BAND[1]:
            c = 0.0
        r = torch.exp(logprobs[t] - before)
        clipped = 1 - CLIP_LOW if r < 1 - CLIP_LOW else 1 + CLIP_HIGH if r > 1 + CLIP_HIGH else r
        best = r * a if r * a <= clipped * a else clipped * a
        total = total - w * c * best
    return total


def slow_k3(logprobs, ref, weights):
    total = logprobs.sum() * 0.0
    for t in range(len(logprobs)):
        if weights[t] != 0:
            d = ref[t] - logprobs[t]
            total = total + weights[t] * (torch.exp(d) - d - 1)
    return total


@given(seeds, st.integers(0, 24), st.sampled_from(MODES), st.booleans())
def test_surrogate_equals_a_loop_over_tokens_in_value_and_gradient(seed, length, mode, on_policy):
    tokens = random_tokens(seed, length)
    fast, slow = leaf(tokens["logprobs"]), leaf(tokens["logprobs"].double())
    rest = [tokens[name] for name in ("sampler", "advantages", "weights")]
    old = None if on_policy else tokens["old"]
    loss, metrics = surrogate(fast, old, *rest, importance=mode)
    expected = slow_surrogate(slow, old, *rest, importance=mode)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient(loss, fast).double(), gradient(expected, slow), rtol=1e-4, atol=1e-6
    )
    assert metrics["tokens"] == (tokens["weights"] != 0).sum()
    assert not any(value.requires_grad for value in metrics.values())


@given(seeds, st.integers(0, 24))
def test_k3_equals_a_loop_over_tokens_in_value_and_gradient(seed, length):
    tokens = random_tokens(seed, length)
    fast, slow = leaf(tokens["logprobs"]), leaf(tokens["logprobs"].double())
    loss, _ = kl_penalty(fast, tokens["old"], tokens["weights"], estimator="k3")
    expected = slow_k3(slow, tokens["old"].double(), tokens["weights"].double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        gradient(loss, fast).double(), gradient(expected, slow), rtol=1e-4, atol=1e-6
    )


def test_gradient_reaches_the_policy_log_probs_alone():
    tensors = [leaf(torch.randn(5)) for _ in range(5)]
    surrogate(*tensors)[0].backward()
    kl_penalty(*tensors[:3], estimator="k1")[0].backward()
    kl_penalty(*tensors[:3], estimator="k3")[0].backward()
    nll_loss(tensors[0], tensors[1]).backward()
    assert tensors[0].grad is not None
    assert all(other.grad is None for other in tensors[1:])


# ------------------------------------------------------------------- weights


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.sampled_from(["token", "sequence"]))
def test_weights_of_all_tokens_sum_to_one_where_all_rollouts_have_tokens(lengths, mode):
    lengths_N = torch.tensor(lengths) + 1
    weights_N = token_weights(
        lengths_N, len(lengths), mode, total_tokens=int(lengths_N.sum()), max_tokens=None
    )
    assert float((weights_N * lengths_N).sum()) == pytest.approx(1.0, rel=1e-6)


def test_weights_by_mode():
    lengths_N = torch.tensor([2, 0, 6])
    counts = {"total_tokens": 16, "max_tokens": 10}
    assert token_weights(lengths_N, 4, "token", **counts).tolist() == [1 / 16, 0, 1 / 16]
    torch.testing.assert_close(
        token_weights(lengths_N, 4, "sequence", **counts), torch.tensor([1 / 8, 0, 1 / 24])
    )
    torch.testing.assert_close(
        token_weights(lengths_N, 4, "constant", **counts), torch.tensor([1 / 40, 0, 1 / 40])
    )


def test_weights_refuse_local_counts_and_a_missing_bound():
    lengths_N = torch.tensor([2, 6])
    with pytest.raises(ValueError, match="all micro-batches and ranks"):
        token_weights(lengths_N, 2, "token", total_tokens=7, max_tokens=None)
    with pytest.raises(ValueError, match="all micro-batches and ranks"):
        token_weights(lengths_N, 1, "sequence", total_tokens=8, max_tokens=None)
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(lengths_N, 2, "constant", total_tokens=8, max_tokens=None)


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_c08_weights_of_a_step_without_tokens_are_zero(mode):
    weights_N = token_weights(torch.tensor([0, 0]), 0, mode, total_tokens=0, max_tokens=4)
    assert weights_N.tolist() == [0.0, 0.0]


# ------------------------------------------------------------------- accumulation


LENGTHS = [5, 0, 1, 9, 3, 0, 7, 2]


def step_gradient(micro_batches: list[list[int]], mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulates all losses of a small softmax policy over micro-batches of rollout numbers."""
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(16, dtype=torch.float64, generator=g).requires_grad_()
    rollouts = []
    for length in LENGTHS:
        ids = torch.randint(16, (length,), generator=g)
        noise = [0.3 * torch.randn(length, generator=g) for _ in range(4)]
        rollouts.append((ids, *noise))
    here = [i for batch in micro_batches for i in batch]
    lengths_N = torch.tensor([LENGTHS[i] for i in here])
    weights = token_weights(
        lengths_N, len(here), mode, total_tokens=int(lengths_N.sum()), max_tokens=12
    )
    weight_of = dict(zip(here, weights.tolist(), strict=True))
    total: dict[str, Tensor] = {}
    for batch in micro_batches:
        ids, *noise = (
            torch.cat([rollouts[i][k] for i in batch] or [torch.zeros(0, dtype=dtype)])
            for k, dtype in enumerate([torch.int64] + 4 * [torch.float32])
        )
        weights_T = torch.cat(
            [torch.full((LENGTHS[i],), weight_of[i]) for i in batch] or [noise[0]]
        )
        logprobs_T = theta.log_softmax(0)[ids]
        old_T, sampler_T, ref_T = (logprobs_T.detach().float() + x for x in noise[:3])
        loss, metrics = surrogate(logprobs_T, old_T, sampler_T, noise[3], weights_T, "masked")
        kl, kl_metrics = kl_penalty(logprobs_T, ref_T, weights_T, estimator="k3")
        (loss + 0.1 * kl + 0.2 * nll_loss(logprobs_T, weights_T)).backward()
        for name, value in (metrics | kl_metrics).items():
            if not name.endswith("_argmax"):
                merge = torch.maximum if name.endswith("_max") else torch.add
                total[name] = merge(total[name], value) if name in total else value
    assert theta.grad is not None
    return theta.grad, total


def assert_same_step(one, other):
    assert (one[0] - other[0]).norm() <= 1e-6 * one[0].norm()
    assert one[0].norm() > 0
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name], value, rtol=1e-5, atol=1e-5, msg=name)


SPLITS = {
    "1x8": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4x2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "8x1": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "uneven, some empty": [[7, 1, 5], [], [3], [0, 2, 4, 6], []],
}


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
@pytest.mark.parametrize("split", SPLITS)
def test_c06_micro_batches_add_up_to_the_one_big_batch(split, mode):
    assert_same_step(step_gradient(SPLITS["1x8"], mode), step_gradient(SPLITS[split], mode))


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_c05_each_update_of_a_generation_equals_its_own_big_batch(mode):
    micro_batches = SPLITS["4x2"]
    for update in (micro_batches[:2], micro_batches[2:]):
        big = [[i for batch in update for i in batch]]
        assert_same_step(step_gradient(big, mode), step_gradient(update, mode))


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_c07_rollouts_masked_out_leave_both_sides_of_the_fraction(mode):
    lengths = torch.tensor([4, 6, 4, 6])
    truncated = torch.tensor([False, True, False, True])
    trained = torch.where(truncated, 0, lengths)
    masked_N = token_weights(trained, 2, mode, total_tokens=8, max_tokens=10)
    without_N = token_weights(lengths[~truncated], 2, mode, total_tokens=8, max_tokens=10)
    assert masked_N[~truncated].tolist() == without_N.tolist()
    assert not masked_N[truncated].any()
    logprobs_T = -torch.rand(20)
    loss = nll_loss(logprobs_T, masked_N.repeat_interleave(lengths))
    kept_T = (~truncated).repeat_interleave(lengths)
    alone = nll_loss(logprobs_T[kept_T], without_N.repeat_interleave(lengths[~truncated]))
    torch.testing.assert_close(loss, alone)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_c08_no_trained_token_gives_a_zero_that_can_run_backward(num_tokens):
    policy = leaf(torch.ones(1))
    logprobs_T = policy.expand(num_tokens) * 1.0
    zeros = torch.zeros(num_tokens)
    losses = [
        surrogate(logprobs_T, old, zeros, zeros, zeros, mode)[0]
        for old in (None, zeros)
        for mode in MODES
    ]
    losses += [kl_penalty(logprobs_T, zeros, zeros, estimator=e)[0] for e in ("k1", "k3")]
    losses.append(nll_loss(logprobs_T, zeros))
    for loss in losses:
        assert loss == 0
        assert gradient_or_fail(loss, policy).tolist() == [0.0]
    metrics = surrogate(logprobs_T, None, zeros, zeros, zeros)[1]
    metrics |= kl_penalty(logprobs_T, zeros, zeros, estimator="k3")[1]
    for name, value in metrics.items():
        assert value == (-1 if name.endswith("_argmax") else 0), name


def gradient_or_fail(loss: Tensor, policy: Tensor) -> Tensor:
    assert loss.requires_grad
    (grad,) = torch.autograd.grad(loss, policy, retain_graph=True)
    return grad


# ------------------------------------------------------------------- ratios


@pytest.mark.parametrize("mode", MODES)
def test_c10_ratios_are_one_on_policy_at_a_temperature_and_wrong_log_probs_show(mode):
    logits = torch.randn(200, 32, generator=torch.Generator().manual_seed(3)) * 2
    ids = torch.distributions.Categorical(logits=logits / 0.6).sample()
    tempered_T = (logits / 0.6).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    raw_T = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    ones = torch.ones(200)
    _, good = surrogate(tempered_T, None, tempered_T, ones, ones, mode)
    assert good["ratio_sum"] == good["importance_sum"] == good["tokens"] == 200
    assert good["sampler_gap_max"] == 0
    _, bad = surrogate(tempered_T, None, raw_T, ones, ones, mode)
    assert bad["importance_sum"] / bad["tokens"] > 1.2
    assert bad["sampler_gap_max"] > 0.5


@given(seeds, st.integers(1, 20))
def test_old_log_probs_equal_to_the_policys_change_nothing(seed, length):
    tokens = random_tokens(seed, length)
    results = []
    for old in (None, tokens["logprobs"]):
        logprobs = leaf(tokens["logprobs"])
        loss, metrics = surrogate(
            logprobs, old, tokens["sampler"], tokens["advantages"], tokens["weights"], "masked"
        )
        results.append((loss, gradient(loss, logprobs), *metrics.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@given(seeds, st.integers(1, 20))
def test_on_policy_gradient_is_minus_weight_times_correction_times_advantage(seed, length):
    tokens = random_tokens(seed, length)
    logprobs = leaf(tokens["logprobs"])
    sampler = tokens["logprobs"] + 0.25
    loss, _ = surrogate(
        logprobs, None, sampler, tokens["advantages"], tokens["weights"], "truncated"
    )
    expected = -tokens["weights"] * math.exp(-0.25) * tokens["advantages"]
    torch.testing.assert_close(gradient(loss, logprobs), expected, rtol=1e-5, atol=1e-7)


def test_clip_counts_the_tokens_whose_gradient_it_removed():
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logprobs, zeros = leaf(log_ratio), torch.zeros(5)
    loss, metrics = surrogate(logprobs, zeros, zeros, advantages, torch.ones(5))
    assert (gradient(loss, logprobs) == 0).tolist() == [True, False, False, True, False]
    assert (metrics["clip_high"], metrics["clip_low"]) == (1, 1)
    assert metrics["ratio_sum"] == pytest.approx(float(log_ratio.exp().sum()))


def test_truncated_caps_and_masked_drops_but_keeps_the_denominator():
    wanted = torch.tensor([0.1, 0.9, 1.9, 4.0])
    sampler, ones = -wanted.log(), torch.ones(4)
    for mode, applied in (
        ("none", [1, 1, 1, 1]),
        ("truncated", [0.1, 0.9, 1.5, 1.5]),
        ("masked", [0, 0.9, 1.9, 0]),
    ):
        logprobs = leaf(torch.zeros(4))
        loss, metrics = surrogate(logprobs, None, sampler, ones, ones / 4, mode)
        torch.testing.assert_close(gradient(loss, logprobs), -torch.tensor(applied) / 4)
        assert metrics["importance_masked"] == (2 if mode == "masked" else 0)
        assert metrics["importance_max"] == pytest.approx(4.0)
        assert metrics["importance_sum"] == pytest.approx(6.9)


@pytest.mark.parametrize("mode", ["truncated", "masked"])
def test_c13_a_small_bias_per_token_does_not_grow_with_the_length(mode):
    logprobs, ones = leaf(torch.full((300,), -0.5)), torch.ones(300)
    loss, metrics = surrogate(logprobs, None, logprobs.detach() - 0.012, ones, ones / 300, mode)
    torch.testing.assert_close(
        gradient(loss, logprobs), -torch.full((300,), math.exp(0.012) / 300), rtol=1e-5, atol=0
    )
    assert metrics["importance_masked"] == 0
    assert metrics["importance_max"] == pytest.approx(math.exp(0.012), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_old", [False, True])
def test_c14_a_missing_sampler_log_prob_has_ratio_one_and_is_counted(mode, with_old):
    values, ones = torch.tensor([-0.3, -5.0, -0.2]), torch.ones(3)
    logprobs = leaf(values)
    old = values.clone() if with_old else None
    sampler = torch.tensor([-0.3, NAN, -0.2])
    loss, metrics = surrogate(logprobs, old, sampler, ones, ones, mode)
    assert gradient(loss, logprobs).tolist() == [-1.0, -1.0, -1.0]
    assert metrics["logprobs_missing"] == 1
    assert metrics["importance_sum"] == 3
    assert metrics["importance_masked"] == metrics["sampler_gap_max"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_c15_idle_tokens_may_hold_anything_anywhere(mode, junk):
    tokens = random_tokens(11, 12)
    tokens["weights"][[0, 5, 9]] = 0.0
    idle = tokens["weights"] == 0
    names = ["old", "sampler", "advantages"]
    clean = leaf(tokens["logprobs"])
    wanted, wanted_metrics = surrogate(
        clean, *(tokens[n] for n in names), tokens["weights"], importance=mode
    )
    for where in (["logprobs"], ["old"], ["sampler"], ["advantages"], ["logprobs", *names]):
        dirty = {n: torch.where(idle, junk, t) if n in where else t for n, t in tokens.items()}
        logprobs = leaf(dirty["logprobs"])
        for old in (dirty["old"], None):
            loss, metrics = surrogate(
                logprobs, old, dirty["sampler"], dirty["advantages"], tokens["weights"], mode
            )
            assert gradient(loss, logprobs).isfinite().all()
            assert not gradient_of_idle(logprobs, old, dirty, mode)[idle].any()
            if old is not None:
                assert torch.equal(loss, wanted)
                assert all(torch.equal(metrics[n], v) for n, v in wanted_metrics.items())
        for estimator in ("k1", "k3"):
            kl, kl_metrics = kl_penalty(
                logprobs, dirty["old"], tokens["weights"], estimator=estimator
            )
            assert kl.isfinite()
            assert gradient(kl, logprobs).isfinite().all()
            assert all(value.isfinite() for value in kl_metrics.values())
        assert gradient(nll_loss(logprobs, tokens["weights"]), logprobs).isfinite().all()


def gradient_of_idle(logprobs, old, dirty, mode) -> Tensor:
    loss, _ = surrogate(
        logprobs, old, dirty["sampler"], dirty["advantages"], dirty["weights"], mode
    )
    return gradient(loss, logprobs)


@pytest.mark.parametrize("sampler", [-INF, -300.0, 300.0])
def test_c15_a_token_that_the_band_drops_contaminates_nothing(sampler):
    for value, old in ((-1.0, None), (-INF, None), (-INF, -INF), (-1.0, -INF)):
        logprobs = leaf(torch.tensor([-0.5, value]))
        old_T = None if old is None else torch.tensor([-0.5, old])
        sampler_T = torch.tensor([-0.5, sampler])
        if value == sampler == -INF or old == sampler == -INF:
            continue
        loss, metrics = surrogate(
            logprobs, old_T, sampler_T, torch.ones(2), torch.ones(2), "masked"
        )
        assert loss == -1
        assert gradient(loss, logprobs).tolist() == [-1.0, 0.0]
        assert metrics["importance_masked"] == 1
        assert metrics["ratio_sum"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_trained_token_without_a_log_prob_shows_in_the_loss(mode):
    ones = torch.ones(2)
    loss, _ = surrogate(torch.tensor([-1.0, NAN]), None, -ones, ones, ones, mode)
    assert loss.isnan()


# ------------------------------------------------------------------- bounds, KL, outliers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("log_ratio", [-200.0, -22.0, -9.9, 9.9, 10.1, 22.0, 200.0])
def test_c16_extreme_log_ratios_keep_loss_and_gradient_finite(dtype, log_ratio):
    ones = torch.ones(1)
    for low, high in ((-abs(log_ratio), 0.0), (0.0, -abs(log_ratio))):
        logprobs = leaf(torch.tensor([low], dtype=dtype))
        other = torch.tensor([high], dtype=dtype)
        losses = [kl_penalty(logprobs, other, ones, estimator=e)[0] for e in ("k1", "k3")]
        for sign in (-1.0, 1.0):
            for mode in MODES:
                losses.append(surrogate(logprobs, other, other, sign * ones, ones, mode)[0])
                losses.append(surrogate(logprobs, None, other, sign * ones, ones, mode)[0])
        for loss in losses:
            assert loss.dtype == torch.float32
            assert loss.isfinite()
            assert gradient(loss, logprobs).isfinite().all()


def test_ratios_of_half_precision_inputs_are_computed_in_float32():
    values, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0078125, -2.015625])
    half = leaf(values.bfloat16())
    ones = torch.ones(2)
    loss, _ = surrogate(half, old.bfloat16(), old.bfloat16(), ones, ones)
    expected, _ = surrogate(values, old, old, ones, ones)
    assert torch.equal(loss, expected)
    assert gradient(loss, half).dtype == torch.bfloat16


@given(seeds, st.integers(1, 20))
def test_k3_is_never_negative_and_zero_at_the_reference(seed, length):
    tokens = random_tokens(seed, length)
    ones = torch.ones(length)
    loss, metrics = kl_penalty(tokens["logprobs"], tokens["old"], ones, estimator="k3")
    assert loss >= 0
    assert metrics["kl_sum"] == loss
    same = leaf(tokens["logprobs"])
    loss, metrics = kl_penalty(same, tokens["logprobs"], ones, estimator="k3")
    assert loss == 0
    assert not gradient(loss, same).any()
    assert metrics["kl_gap_max"] == 0


@given(seeds, st.integers(1, 20))
def test_k1_has_the_value_of_k1_and_the_gradient_of_k2(seed, length):
    tokens = random_tokens(seed, length)
    logprobs, ref, weights = leaf(tokens["logprobs"]), tokens["old"], tokens["weights"]
    loss, _ = kl_penalty(logprobs, ref, weights, estimator="k1")
    torch.testing.assert_close(loss, (weights * (logprobs - ref)).sum())
    k2 = (weights * (logprobs - ref) ** 2 / 2).sum()
    torch.testing.assert_close(gradient(loss, logprobs), gradient(k2, logprobs))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_kl_is_the_exact_reverse_kl(estimator):
    g = torch.Generator().manual_seed(5)
    theta, ref = leaf(torch.randn(8, generator=g)), torch.randn(8, generator=g).log_softmax(0)
    logprobs_V = theta.log_softmax(0)
    probs_V = logprobs_V.detach().exp()
    # Weighting each token by its probability is the expectation over the policy's samples.
    loss, _ = kl_penalty(logprobs_V, ref, probs_V, estimator=estimator)
    exact = (logprobs_V.exp() * (logprobs_V - ref)).sum()
    torch.testing.assert_close(loss, exact)
    wanted = exact
    if estimator == "k3":
        wanted = (ref.exp() * (ref - logprobs_V)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, theta, retain_graph=True)[0],
        torch.autograd.grad(wanted, theta)[0],
    )


def test_c17_one_far_token_is_located_although_its_weight_hides_it():
    logprobs, other = torch.full((50,), -0.7), torch.full((50,), -0.7)
    logprobs[31] = -22.7
    weights = torch.full((50,), 1e-12)
    assert locate_outliers(logprobs, other, 10.0).tolist() == [31]
    _, metrics = kl_penalty(logprobs, other, weights, estimator="k3")
    assert metrics["kl_gap_argmax"] == 31
    assert metrics["kl_gap_max"] == pytest.approx(22.0)
    assert metrics["kl_bounded"] == 1
    assert metrics["kl_sum"] <= math.exp(LOG_RATIO_BOUND)
    _, metrics = surrogate(logprobs, None, other, torch.ones(50), weights)
    assert metrics["sampler_gap_argmax"] == 31
    assert metrics["sampler_gap_max"] == metrics["sampler_gap_sum"] == pytest.approx(22.0)


def test_c17_missing_log_probs_are_no_outliers_and_broken_ones_are():
    logprobs = torch.tensor([-1.0, -1.0, -1.0, NAN, -INF, -INF, -1.0])
    other = torch.tensor([NAN, -1.5, -INF, -1.0, -1.0, -INF, -3.1])
    assert locate_outliers(logprobs, other, 2.0).tolist() == [2, 3, 4, 6]
    assert locate_outliers(torch.zeros(0), torch.zeros(0), 1.0).tolist() == []


def test_the_largest_gap_is_never_that_of_an_idle_or_missing_token():
    logprobs, sampler = torch.full((4,), -1.0), torch.tensor([-9.0, NAN, -1.5, -1.0])
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0])
    _, metrics = surrogate(logprobs, None, sampler, torch.ones(4), weights)
    assert metrics["sampler_gap_argmax"] == 2
    assert metrics["sampler_gap_sum"] == 0.5


def test_no_pair_of_log_probs_gives_no_position():
    ones = torch.ones(2)
    _, metrics = surrogate(-ones, None, torch.full((2,), NAN), ones, ones)
    assert metrics["sampler_gap_argmax"] == -1
    assert metrics["sampler_gap_max"] == 0
    assert metrics["logprobs_missing"] == 2


@pytest.mark.parametrize(("estimator", "slope"), [("k1", LOG_RATIO_BOUND), ("k3", 1.0)])
def test_c16_a_token_that_the_reference_rules_out_has_a_finite_gradient(estimator, slope):
    logprobs = leaf(torch.tensor([-0.5]))
    loss, metrics = kl_penalty(logprobs, torch.tensor([-INF]), torch.ones(1), estimator=estimator)
    assert loss == metrics["kl_gap_max"] == INF
    assert gradient(loss, logprobs).tolist() == [slope]
