"""Served teachers, with a server that is scripted; a real one is in tests/with_vllm."""

import numpy as np
import pytest

from reframe_vl.policy.loading import Policy
from reframe_vl.rollout import vllm_teacher
from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_backend import EngineDown
from reframe_vl.rollout.vllm_request import Reply
from reframe_vl.rollout.vllm_teacher import ServedTeacher, ServedTeachers
from reframe_vl.tools.codec import codec_for
from reframe_vl.types import Context
from tiny import random_context, sampling, tiny_model, tokenizer

URL = "http://teacher:8000"


class ScriptedServer:
    """Says that token t at position p has log-prob -(t + p / 1000)."""

    model = None
    deaths = 0
    unknown = ()
    shift = 0

    def __init__(self, url, start_timeout_s=0.0, min_length=None):
        assert url == URL
        self.needed.append(min_length)

    async def start(self):
        pass

    async def close(self):
        pass

    async def call(self, method, *arguments):
        self.calls.append((method, *arguments))

    async def tokenize(self, text):
        return [i + self.shift for i in tokenizer()(text, add_special_tokens=False)["input_ids"]]

    async def generate(self, request):
        kind = type(self)
        if kind.deaths:
            kind.deaths -= 1
            raise EngineDown("killed.")
        ids = self.model.expand(Context(self.spans[tuple(request.token_ids)])).token_ids
        values = [None if t in self.unknown else -(t + p / 1000) for p, t in enumerate(ids)]
        return Reply(ids.tolist(), [5], [-1.0], "length", values)


@pytest.fixture
def server(monkeypatch):
    """The scripted server's class, for each test anew."""
    own = {"calls": [], "needed": [], "model": tiny_model("qwen3_vl")}
    kind = type("Server", (ScriptedServer,), own)
    monkeypatch.setattr(vllm_teacher, "ServerVLLM", kind)
    return kind


def contexts_of(server):
    rng = np.random.default_rng(0)
    contexts = [random_context(rng, server.model.view_maker, n) for n in (1, 2, 3)]
    server.spans = {tuple(c.token_ids): c.spans for c in contexts}
    return contexts


def expected(model, context):
    row = model.expand(context)
    return np.float32([-(row.token_ids[p] + p / 1000) for p in row.trained])


def test_log_probs_are_those_of_the_trained_tokens_in_the_students_distribution(server):
    contexts, how = contexts_of(server), sampling(0.7)
    found = ServedTeacher(URL, server.model).log_probs(contexts, how)
    for context, values in zip(contexts, found, strict=True):
        np.testing.assert_allclose(values, expected(server.model, context), rtol=1e-6)
    [(method, temperature, banned, size)] = server.calls
    assert (method, temperature, size) == ("shape_logits", "0.7", "384")
    assert banned == str(list(how.banned_ids))


def test_a_server_that_dies_is_asked_again_and_not_for_ever(server):
    contexts, how = contexts_of(server), sampling()
    server.deaths = 1
    assert len(ServedTeacher(URL, server.model).log_probs(contexts, how)) == 3
    assert len(server.calls) == 2
    server.deaths = 100
    with pytest.raises(EngineError):
        ServedTeacher(URL, server.model).log_probs(contexts, how)


def test_a_token_without_a_log_prob_is_named(server):
    contexts = contexts_of(server)
    server.unknown = {t for span in contexts[0].spans if span.trained for t in span.token_ids}
    with pytest.raises(EngineError, match="no log-prob of token"):
        ServedTeacher(URL, server.model).log_probs(contexts, sampling())


def test_urls_are_served_and_c19_their_tokens_must_be_the_students(server):
    student = Policy(server.model, tokenizer(), codec_for("qwen3_vl"), "tiny")
    teachers = ServedTeachers({"spatial": URL}, {"image": "spatial"})
    teachers.load(student)
    assert isinstance(teachers.of("image"), ServedTeacher)
    assert not teachers.heads_stay
    server.shift = 1
    with pytest.raises(EngineError, match="one tokenizer"):
        ServedTeachers({"spatial": URL}, {"image": "spatial"}).load(student)


def test_a_server_has_to_take_the_longest_context_and_the_token_that_scoring_asks_for(server):
    student = Policy(server.model, tokenizer(), codec_for("qwen3_vl"), "tiny")
    ServedTeachers({"spatial": URL}, {"image": "spatial"}, context_tokens=512).check(student)
    assert server.needed == [513]
