"""How the engine behaves around a vLLM, with one that is scripted."""

import asyncio
import os

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from reframe_vl.rollout import vllm_weights
from reframe_vl.rollout.engine import EngineError, SyncedEngine
from reframe_vl.rollout.vllm_backend import EngineDown
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

    def __init__(self, model, deaths=(), stillborn=0, extra_tokens=()):
        self.model, self.deaths, self.stillborn = model, set(deaths), stillborn
        self.extra_tokens = list(extra_tokens)
        self.running, self.log, self.requests, self.most, self.now = False, [], 0, 0, 0

    async def start(self):
        self.log.append("start")
        if self.stillborn and self.log.count("start") > 1:
            raise EngineError("no memory")
        self.running = True

    async def generate(self, request):
        self.requests += 1
        if self.requests in self.deaths:
            self.running = False
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        if not self.running:
            raise EngineDown("killed.")
        expanded = request.token_ids + self.extra_tokens
        return Reply(expanded, [request.parameters["seed"] % 90], [-1.0], "stop")

    async def load_weights(self, folder):
        if not self.running:
            raise EngineDown("killed.")
        self.log.append(f"weights {folder.name}")

    async def load_adapter(self, folder):
        self.log.append(f"adapter {folder.name}")

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
    dead, alive = (
        tmp_path / "reframe-weights-99999999-a",
        tmp_path / f"reframe-weights-{os.getpid()}-b",
    )
    dead.mkdir(), alive.mkdir()
    new = vllm_weights.new_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, new])
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
