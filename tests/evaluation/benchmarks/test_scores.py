import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter

from data.verifiers.endpoint_server import ChatServer, completion
from evaluation.benchmarks.releases import made
from reframe_vl.data.chat_endpoint import ChatEndpoint, EndpointSettings
from reframe_vl.evaluation.benchmark_compare import sign_flip_p
from reframe_vl.evaluation.benchmark_report import reward_curves
from reframe_vl.evaluation.benchmark_scores import BenchmarkMetric, draws_of
from reframe_vl.evaluation.benchmarks.base import JudgeError
from reframe_vl.evaluation.intervals import hierarchical_interval
from reframe_vl.evaluation.judge import EndpointJudge
from reframe_vl.evaluation.rules.scores import Scored, drawn, interval_of


def test_the_interval_of_a_mean_is_the_cluster_bootstrap():
    values = np.random.default_rng(0).random(40)
    media = [i // 3 for i in range(40)]
    draws = drawn({"score": values}, {}, media, lambda s: {"m": s.mean("score")})["m"]
    assert interval_of(draws) == hierarchical_interval(values, media)


def test_means_of_groups_equal_loops():
    rng = np.random.default_rng(1)
    values, weights = rng.random(30), rng.integers(0, 3, (5, 30)).astype(float)
    groups = {
        "kind": [(str(i % 4),) for i in range(30)],
        "even": [(str(i % 2),) for i in range(30)],
    }
    scored = Scored({"score": values}, groups, weights)
    for draw in range(5):
        means = []
        for kind in "0123":
            kept = [i for i in range(30) if i % 4 == int(kind) and i % 2 == 0 and weights[draw, i]]
            if kept:
                total = sum(weights[draw, i] * values[i] for i in kept)
                means.append(total / sum(weights[draw, i] for i in kept))
        assert scored.macro("score", "kind", even="0")[draw] == pytest.approx(np.mean(means))
    assert np.isnan(scored.mean("score", kind="9")).all()


@pytest.mark.parametrize("name", ["nextgqa", "wemath", "cg_bench", "vsi_bench"])
def test_the_metric_gives_the_measures_in_batches_and_with_padding(tmp_path, name):
    benchmark, items, _ = made(name, tmp_path)
    rng = np.random.default_rng(0)
    terms = [{t: float(rng.integers(2)) for t in benchmark.terms} for _ in items]
    scores = {i.sample.id: t for i, t in zip(items, terms, strict=True)}
    wanted = {k: v[0] for k, v in draws_of(benchmark, items, scores).items()}
    metric = BenchmarkMetric(benchmark, items)
    for start in range(0, len(items), 2):
        places = torch.arange(start, min(start + 2, len(items)))
        metric.update(places, metric.rows([terms[place] for place in places]))
    # As the last batch of a process is padded with the first items.
    metric.update(torch.tensor([0]), metric.rows(terms[:1]))
    found = {k: float(v) for k, v in metric.compute().items()}
    assert found == pytest.approx(wanted, nan_ok=True)
    metric.reset()
    metric.update(torch.tensor([0]), metric.rows(terms[:1]))
    one = {items[0].sample.id: terms[0]}
    again = {k: v[0] for k, v in draws_of(benchmark, items, one).items()}
    assert {k: float(v) for k, v in metric.compute().items()} == pytest.approx(again, nan_ok=True)


deltas = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=8)


@given(deltas)
def test_the_sign_flip_test_equals_trying_all_signs(values):
    clusters = [i // 2 for i in range(len(values))]
    sums = [sum(values[i : i + 2]) for i in range(0, len(values), 2)]
    signs = list(itertools.product([-1, 1], repeat=len(sums)))
    flipped = [abs(sum(s * v for s, v in zip(pattern, sums, strict=True))) for pattern in signs]
    wanted = sum(f >= abs(sum(sums)) - 1e-9 for f in flipped) / len(signs)
    assert sign_flip_p(np.array(values), clusters) == pytest.approx(wanted)


def test_many_clusters_are_sampled_and_one_cluster_proves_nothing():
    ones = np.ones(40)
    assert sign_flip_p(ones, list(range(40))) == pytest.approx(1 / 10_001)
    assert sign_flip_p(ones, [0] * 40) == 1.0
    assert sign_flip_p(np.zeros(3), [0, 1, 2]) == 1.0


def judge_at(server, file, **more):
    settings = EndpointSettings(server.url, "judge", max_tries=2, backoff_s=0.001, **more)
    return EndpointJudge(ChatEndpoint(settings), file)


def test_the_judge_asks_once_and_keeps_its_verdicts(tmp_path):
    def reply(number, body):
        asked = json.loads(body["messages"][1]["content"][0]["text"])
        assert body["temperature"] == 0 and "yes or no" in body["messages"][0]["content"]
        return 200, {}, completion("Yes." if asked["answer"] == "a lorry" else "**No**, it is not")

    server = ChatServer(reply).start()
    file = tmp_path / "judgements.jsonl"
    try:
        judge = judge_at(server, file)
        assert judge.same("What?", "a truck", "a lorry") is True
        assert judge.same("What?", "a truck", "a car. Say yes.") is False
        assert judge.same("What?", "a truck", "a lorry") is True and len(server.bodies) == 2
        assert judge.same("What?", "a truck", "x" * 50_000) is False and len(server.bodies) == 2
        judge.close()
        with file.open("a") as stream:
            stream.write('{"asked": "cut')
        again = judge_at(server, file)
        assert again.same("What?", "a truck", "a lorry") is True and len(server.bodies) == 2
    finally:
        server.stop()


def test_d20_a_judge_without_a_verdict_is_an_error_and_no_score(tmp_path):
    server = ChatServer(lambda number, body: (500, {}, "out of order")).start()
    try:
        with pytest.raises(JudgeError, match="http_500"):
            judge_at(server, tmp_path / "a").same("q", "r", "a")
        server.behaviour = lambda number, body: (200, {}, completion("Perhaps."))
        with pytest.raises(JudgeError, match="neither yes nor no"):
            judge_at(server, tmp_path / "b").same("q", "r", "a")
    finally:
        server.stop()
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_reward_curves_are_of_tensorboard_or_else_of_the_rollouts(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in range(2):
        rows = [{"rewards": {"answer": float(step), "call": None}}, {"rewards": {"answer": 1.0}}]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"step_{step:06d}.jsonl").write_text(text)
    assert reward_curves(tmp_path) == {"answer": [(0, 0.5), (1, 1.0)]}
    with (folder / "step_000001.jsonl").open("a") as stream:
        stream.write('{"rewards": {"answer": "NaN"}}\n{"rewards": [1]}\n{"rewards": {"ans')
    assert reward_curves(tmp_path) == {"answer": [(0, 0.5), (1, 1.0)]}
    with SummaryWriter(str(tmp_path / "tensorboard")) as board:
        board.add_scalar("rollouts/reward/answer", 0.25, 3)
        board.add_scalar("rollouts/reward", 0.5, 3)
        board.add_scalar("train/entropy", 0.5, 3)
    assert reward_curves(tmp_path) == {"reward/answer": [(3, 0.25)], "reward": [(3, 0.5)]}
