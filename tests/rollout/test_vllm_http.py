"""How a vLLM server is talked to, with one that is scripted."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_backend import EngineDown
from reframe_vl.rollout.vllm_http import ServerVLLM
from reframe_vl.rollout.vllm_launch import LaunchedVLLM
from reframe_vl.rollout.vllm_request import Request

ANSWER = {
    "prompt_token_ids": [1, 2],
    "prompt_logprobs": None,
    "choices": [
        {
            "token_ids": [5, 6],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "/dev/shm/w/version_1", "start": 0, "end": 2}],
        }
    ],
}


@pytest.fixture
def server():
    """A server whose answers are ``(status, body)`` by path; ``asked`` holds what was posted."""
    answers = {
        "/health": (200, {}),
        "/is_paused": (200, {}),
        "/v1/models": (200, {"data": [{"id": "m", "max_model_len": 512}]}),
        "/inference/v1/generate": (200, ANSWER),
        "/collective_rpc": (200, {"results": [None]}),
    }
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path, (200, {}))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            text = self.rfile.read(int(self.headers["content-length"]))
            asked.append((self.path, json.loads(text)))
            self.do_GET()

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.answers, http.asked = answers, asked
    http.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()


def run(backend, *calls):
    """Starts it and awaits the calls; the last one's result."""

    async def all_of_them():
        result = await backend.start()
        for call in calls:
            result = await call()
        await backend.close()
        return result

    return asyncio.run(all_of_them())


def test_an_answer_has_its_log_probs_and_the_weights_that_sampled_it(server):
    backend = ServerVLLM(server.url)
    reply = run(backend, lambda: backend.generate(Request([1, 2], [], {"seed": 3})))
    assert reply.token_ids == [5, 6] and reply.logprobs == [-0.5, -9999.0]
    assert reply.versions == ["/dev/shm/w/version_1"] and reply.finish == "stop"


def test_g02_weights_are_loaded_then_caches_forgotten_then_the_version_is_named(server, tmp_path):
    backend = ServerVLLM(server.url)
    run(backend, lambda: backend.load_weights(tmp_path))
    paths = [path for path, _ in server.asked]
    assert paths[0] == "/collective_rpc" and paths[-1] == "/update_weight_version"
    assert sum(path.startswith("/reset_") for path in paths[1:-1]) == 3
    assert server.asked[-1][1] == {"new_version": str(tmp_path)}


def test_a_server_that_takes_shorter_contexts_than_rollouts_have_is_refused_at_the_start(server):
    run(ServerVLLM(server.url, min_length=512))
    with pytest.raises(EngineError, match=r"512 tokens.*may have 513.*--max-model-len 513"):
        run(ServerVLLM(server.url, min_length=513))


def test_a_plain_vllm_serve_is_refused_with_how_to_start_one(server):
    server.answers["/is_paused"] = (404, {})
    with pytest.raises(EngineError, match=r"does not take weights.*vllm_server MODEL"):
        run(ServerVLLM(server.url))


def test_what_a_server_refuses_is_told_and_one_that_is_ill_is_down(server):
    backend = ServerVLLM(server.url)
    request = Request([1, 2], [], {})
    server.answers["/inference/v1/generate"] = (400, {"error": "LoRA rank 32 is too large"})
    with pytest.raises(EngineError, match=r"rank 32 is too large.*--max-lora-rank") as refused:
        run(backend, lambda: backend.generate(request))
    assert not isinstance(refused.value, EngineDown)
    server.answers["/inference/v1/generate"] = (500, {})

    async def ill():
        server.answers["/health"] = (503, {})
        return await backend.generate(request)

    with pytest.raises(EngineDown, match="500"):
        run(backend, ill)


def test_a_server_that_closes_a_connection_is_not_taken_for_a_dead_one(server, monkeypatch):
    backend = ServerVLLM(server.url)
    broken = []

    async def ask():
        get = backend._client.get

        async def break_once(path, **settings):
            if not broken:
                broken.append(path)
                raise httpx2.ReadError("")
            return await get(path, **settings)

        monkeypatch.setattr(backend._client, "get", break_once)
        return await backend.is_up()

    assert run(backend, ask) and broken == ["/health"]


def test_a_server_that_has_lost_the_adapter_is_down(server):
    backend = ServerVLLM(server.url)
    server.answers["/inference/v1/generate"] = (404, {})

    async def ask():
        backend.has_adapter = True
        return await backend.generate(Request([1, 2], [], {}))

    with pytest.raises(EngineDown, match="lost the adapter"):
        run(backend, ask)
    assert server.asked[-1][1]["model"] == "policy"


def test_a_launched_server_that_has_ended_is_not_taken_for_another_at_its_port(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")

    async def somebody_answers(self, otherwise=False):
        self.process.wait()
        return True

    monkeypatch.setattr(LaunchedVLLM, "is_up", somebody_answers)
    with pytest.raises(EngineError, match="ended with status 1"):
        asyncio.run(LaunchedVLLM({"model": "nowhere"}).start())
