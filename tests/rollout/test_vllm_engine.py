"""How the engine behaves around a vLLM, with one that is scripted."""

import asyncio
import os
import socket

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file

from reframe_vl.rollout import vllm_weights
from reframe_vl.rollout.engine import EngineError, SharedEngine, SyncedEngine
from reframe_vl.rollout.vllm_backend import EngineDown, OtherWeightsError
from reframe_vl.rollout.vllm_engine import VLLMEngine
from reframe_vl.rollout.vllm_environment import variables, visible
from reframe_vl.rollout.vllm_launch import LaunchedVLLM
from reframe_vl.rollout.vllm_request import ExpansionError, Reply
from reframe_vl.rollout.vllm_server import command_line
from reframe_vl.types import Context
from tiny import random_context, sampling, tiny_model

CPU = torch.device("cpu")


class ScriptedVLLM:
    """Answers with one token; dies whenever the number of requests it has had is in ``deaths``."""

    def __init__(self, model, deaths=(), stillborn=0, extra_tokens=(), loading_s=0.0):
        self.model, self.deaths, self.stillborn = model, set(deaths), stillborn
        self.extra_tokens, self.loading_s = list(extra_tokens), loading_s
        self.weights, self.versions = "default", []
        self.running, self.log, self.requests, self.most, self.now = False, [], 0, 0, 0

    async def start(self):
        self.log.append("start")
        if self.stillborn and self.log.count("start") > 1:
            raise EngineError("no memory")
        self.running, self.weights = True, "default"

    async def generate(self, request):
        self.requests += 1
        starts = self.log.count("start")
        if self.requests in self.deaths:
            self.running = False
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        if not self.running or starts != self.log.count("start"):
            raise EngineDown("killed.")
        expanded = request.token_ids + self.extra_tokens
        self.versions.append(self.weights)
        token = request.parameters["seed"] % 90
        return Reply(expanded, [token], [-1.0], "stop", versions=[self.weights])

    async def load_weights(self, folder):
        if not self.running:
            raise EngineDown("killed.")
        await asyncio.sleep(self.loading_s)
        self.log.append(f"weights {folder.name}")
        self.weights = str(folder)

    async def load_adapter(self, folder):
        self.log.append(f"adapter {folder.name}")
        self.weights = str(folder)

    async def serves(self, folder):
        return self.weights == str(folder)

    async def rest(self):
        self.log.append("rest")

    def stop(self):
        self.running = False
        self.log.append("stop")


def engine_with(tmp_path, model=None, **script):
    model = model or tiny_model("qwen3_vl")
    settings = {"max_concurrent": script.pop("max_concurrent", 16), "max_restarts": 2}
    engine = VLLMEngine(model, weights_folder=str(tmp_path), **settings)
    engine.backend = ScriptedVLLM(model, **script)
    return engine


def text(model, number=0):
    return Context(
        random_context(np.random.default_rng(number), model.view_maker, 1, images=False).spans[:1]
    )


async def turns(engine, count):
    prompt = text(engine.model)
    jobs = [engine.generate(str(i), prompt, sampling(), seed=i) for i in range(count)]
    return [turn.token_ids[0] for turn in await asyncio.gather(*jobs)]


def test_it_is_an_engine_with_weights_of_its_own(tmp_path):
    assert isinstance(engine_with(tmp_path), SyncedEngine)


def test_a_dead_vllm_is_started_again_gets_the_weights_and_no_turn_is_lost(tmp_path):
    engine = engine_with(tmp_path, deaths=[5])

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 3)
        return await turns(engine, 12)

    assert asyncio.run(run()) == list(range(12))
    assert engine.backend.log == ["start", "weights version_3"] * 2
    engine.close()


def test_g01_a_turn_that_begins_while_vllm_is_started_again_waits_for_the_weights(tmp_path):
    engine = engine_with(tmp_path, deaths=[2], loading_s=0.05)

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 3)
        first = asyncio.ensure_future(turns(engine, 2))
        # As after a tool call: vLLM runs again by now, and takes the weights.
        await asyncio.sleep(0.02)
        assert engine.backend.log[-1] == "start" and len(engine.backend.log) == 3
        return await turns(engine, 3), await first

    assert asyncio.run(run()) == ([0, 1, 2], [0, 1])
    assert "default" not in engine.backend.versions


def test_g01_one_that_was_started_again_behind_our_back_gets_the_weights_and_the_turn_again(
    tmp_path,
):
    engine = engine_with(tmp_path)

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 3)
        engine.backend.weights = "default"
        return await turns(engine, 4)

    assert asyncio.run(run()) == [0, 1, 2, 3]
    assert engine.backend.log == ["start", "weights version_3"] * 2


@pytest.mark.parametrize("restarted", [False, True])
def test_g02_weights_are_not_pushed_while_others_are_still_answered(tmp_path, restarted):
    engine = engine_with(tmp_path)
    backend, answer = engine.backend, engine.backend.generate

    # A server of somebody else: here the connection breaks, and others do not.
    async def generate(request):
        seed = request.parameters["seed"]
        await asyncio.sleep(0.05 if seed else 0.01)
        if seed == 0 and backend.log.count("start") == 1:
            backend.weights = "default" if restarted else backend.weights
            raise EngineDown("The connection broke.")
        backend.log.append("answer")
        return await answer(request)

    async def start():
        backend.log.append("start")

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 3)
        backend.generate, backend.start = generate, start
        return await turns(engine, 3)

    assert asyncio.run(run()) == [0, 1, 2]
    pushed = ["start", "weights version_3"]
    again = ["answer", "answer", "weights version_3", *["answer"] * 3]
    assert backend.log == [*pushed, "start", *(again if restarted else ["answer"] * 3)]


def test_two_runs_on_one_server_are_told_so(tmp_path):
    engine = engine_with(tmp_path)

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 3)
        engine.backend.weights = "/dev/shm/reframe-policy-elsewhere-7-x/version_5"
        await turns(engine, 1)

    with pytest.raises(OtherWeightsError, match=r"elsewhere.*another run.*rollout.url"):
        asyncio.run(run())


def test_one_that_does_not_come_back_is_waited_for_once(tmp_path):
    engine = engine_with(tmp_path, deaths=[1], stillborn=1)

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 0)
        prompt = text(engine.model)
        jobs = [engine.generate(str(i), prompt, sampling(), seed=i) for i in range(8)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    failures = asyncio.run(run())
    assert all(isinstance(f, EngineError) and "no memory" in str(f) for f in failures)
    assert engine.backend.log.count("start") == 2


def test_without_room_for_the_weights_the_sync_names_the_remedy(tmp_path, monkeypatch):
    engine = engine_with(tmp_path)

    def full(model, folder):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(vllm_weights, "write_weights", full)

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 0)

    with pytest.raises(EngineError, match=r"No space left.*--shm-size.*weights_folder"):
        asyncio.run(run())
    engine.close()


def test_a_rank_that_does_not_push_checks_answers_and_pushes_again_after_a_death(tmp_path):
    pushing, following = engine_with(tmp_path), engine_with(tmp_path, deaths=[3])

    async def run():
        await pushing.start(CPU)
        await following.start(CPU)
        await pushing.sync(pushing.model, 4)
        following.backend.weights = pushing.served
        await following.follow(pushing.served)
        return await turns(following, 6)

    assert isinstance(pushing, SharedEngine) and pushing.served == ""
    assert asyncio.run(run()) == list(range(6))
    assert following.backend.log == ["start", "start", "weights version_4"]
    assert set(following.backend.versions) == {pushing.served}
    following.close()
    # What is another rank's to remove stays.
    assert os.path.isdir(pushing.served)
    pushing.close()


def test_f18_a_rank_that_does_not_push_asks_the_adapter_too():
    model = tiny_model("qwen3_vl")
    model.model = get_peft_model(model.model, LoraConfig(r=4, target_modules=r".*\.q_proj"))
    engine = VLLMEngine(model, url="http://localhost:1")
    assert not engine.backend.has_adapter
    asyncio.run(engine.follow("/dev/shm/somewhere/version_3"))
    assert engine.backend.has_adapter


def test_an_engine_that_may_never_ask_is_refused():
    with pytest.raises(ValueError, match=r"max_concurrent is 0"):
        VLLMEngine(tiny_model("qwen3_vl"), max_concurrent=0)


def test_one_that_keeps_dying_is_given_up_with_what_to_look_at(tmp_path):
    engine = engine_with(tmp_path, deaths=range(1, 100))

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 0)
        await turns(engine, 1)

    with pytest.raises(EngineError, match=r"died 3 times.*max_restarts"):
        asyncio.run(run())


def test_one_that_cannot_be_started_again_says_why(tmp_path):
    engine = engine_with(tmp_path, deaths=[1], stillborn=1)

    async def run():
        await engine.start(CPU)
        await engine.sync(engine.model, 0)
        await turns(engine, 1)

    with pytest.raises(EngineError, match="no memory"):
        asyncio.run(run())


def test_no_more_requests_are_under_way_than_allowed(tmp_path):
    engine = engine_with(tmp_path, max_concurrent=3)

    async def run():
        await engine.start(CPU)
        await turns(engine, 20)

    asyncio.run(run())
    assert engine.backend.most == 3


def test_b08_another_expansion_ends_the_run(tmp_path):
    engine = engine_with(tmp_path, extra_tokens=[7])

    async def run():
        await engine.start(CPU)
        await turns(engine, 1)

    with pytest.raises(ExpansionError):
        asyncio.run(run())


def test_weights_are_written_as_the_checkpoint_names_them_and_one_version_is_kept(tmp_path):
    model = tiny_model("qwen3_vl")
    engine = engine_with(tmp_path, model)

    async def run():
        await engine.start(CPU)
        for version in range(3):
            await engine.sync(model, version)

    asyncio.run(run())
    [folder] = tmp_path.glob("*/*")
    assert folder.name == "version_2"
    written = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    state = model.base.state_dict()
    assert written.keys() == state.keys()
    assert all((written[name] == state[name]).all() for name in state)
    engine.close()
    assert not list(tmp_path.iterdir())


def test_large_models_are_written_in_several_files(tmp_path):
    model = tiny_model("qwen3_vl")
    vllm_weights.write_weights(model, tmp_path / "new", shard_bytes=20_000)
    files = list((tmp_path / "new").iterdir())
    assert len(files) > 3
    assert sum(len(load_file(f)) for f in files) == len(model.base.state_dict())


def test_a_tied_head_is_not_written_beside_the_embedding(tmp_path):
    model = tiny_model("qwen3_vl")
    model.base.lm_head.weight = model.base.get_input_embeddings().weight
    vllm_weights.write_weights(model, tmp_path / "new")
    [file] = (tmp_path / "new").iterdir()
    assert "lm_head.weight" not in load_file(file)


def test_f18_of_a_frozen_base_the_adapter_alone_is_pushed(tmp_path):
    model = tiny_model("qwen3_vl")
    lora = LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v)_proj")
    model.model = get_peft_model(model.model, lora)
    engine = engine_with(tmp_path, model)
    assert VLLMEngine(model).backend.arguments["max_lora_rank"] == 8

    async def run():
        await engine.start(CPU)
        await engine.sync(model, 1)

    asyncio.run(run())
    assert engine.backend.log == ["start", "adapter version_1"]
    [file] = tmp_path.rglob("*.safetensors")
    assert all("lora_" in name for name in load_file(file))
    engine.close()


def test_weights_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    mine = f"reframe-policy-{socket.gethostname()}"
    # A shared folder also holds those of other machines, whose processes are not seen here.
    kept = [tmp_path / f"{mine}-{os.getpid()}-b", tmp_path / f"{mine}-b-99999999-a"]
    for folder in (tmp_path / f"{mine}-99999999-a", *kept):
        folder.mkdir()
    new = vllm_weights.new_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, new])
    with pytest.raises(FileNotFoundError, match="weights_folder"):
        vllm_weights.new_folder(tmp_path / "nowhere")


def test_a_server_cannot_be_launched_and_be_there_already():
    with pytest.raises(ValueError, match="one of the two"):
        VLLMEngine(tiny_model("qwen3_vl"), url="http://localhost:1", launch=True)


def test_without_vllm_the_start_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    engine = VLLMEngine(tiny_model("qwen3_vl"), weights_folder=str(tmp_path))
    with pytest.raises(EngineError, match=r"reframe-vl\[vllm\].*rollout=hf"):
        asyncio.run(engine.start(CPU))
    engine.close()


def test_a_url_where_nobody_answers_names_the_remedy(tmp_path):
    engine = VLLMEngine(
        tiny_model("qwen3_vl"),
        url="http://127.0.0.1:9",
        weights_folder=str(tmp_path),
        start_timeout_s=0.3,
    )
    with pytest.raises(EngineError, match=r"vllm_server MODEL.*rollout.launch=true"):
        asyncio.run(engine.start(CPU))
    engine.close()


def test_an_address_without_a_scheme_is_refused_at_once():
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        VLLMEngine(tiny_model("qwen3_vl"), url="localhost:8000")


def test_a_launched_server_takes_another_port_where_its_own_is_in_use(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/ls")
    server = LaunchedVLLM({"model": "nowhere"})
    before = server.port
    with socket.socket() as other:
        other.bind(("127.0.0.1", before))
        other.listen()
        with pytest.raises(EngineError, match="ended with status"):
            asyncio.run(server.start())
    assert server.port != before and server.url == f"http://127.0.0.1:{server.port}"


def test_a_launched_server_that_is_not_ready_in_time_shows_its_last_words(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho loading for ever\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    server = LaunchedVLLM({"model": "nowhere"}, start_timeout_s=0.5)
    with pytest.raises(EngineError, match=r"(?s)start_timeout_s.*loading for ever"):
        asyncio.run(server.start())
    assert server.process is None


def test_a_launched_server_that_ends_shows_its_last_words(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/ls")
    server = LaunchedVLLM({"model": "nowhere"})
    with pytest.raises(EngineError, match="ended with status"):
        asyncio.run(server.start())
    assert server.process is None


def test_engine_arguments_become_options():
    words = command_line({"enforce_eager": False, "x_y": {"do_resize": False}, "none": None})
    assert words == ["--no-enforce-eager", "--x-y", '{"do_resize": false}']


@pytest.mark.parametrize(
    ("seen", "device", "devices", "expected"),
    [
        ("", "cpu", None, {}),
        ("", "cuda:1", None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("4,6", "cuda:1", None, {"CUDA_VISIBLE_DEVICES": "6"}),
        ("4,6", "cuda", None, {"CUDA_VISIBLE_DEVICES": "4"}),
        ("4,6", "cuda:0", "7", {"CUDA_VISIBLE_DEVICES": "7"}),
    ],
)
def test_an_engine_sees_the_trainers_accelerator_or_those_it_is_given(
    monkeypatch, seen, device, devices, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible(torch.device(device), devices) == expected
    with variables(expected):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected.get("CUDA_VISIBLE_DEVICES", seen)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
