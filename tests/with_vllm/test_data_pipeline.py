"""The data pipeline against a real OpenAI-compatible server that is stopped and started mid-run."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import numpy as np
import pytest
from PIL import Image

from reframe_vl.data.chat_endpoint import EndpointSettings
from reframe_vl.data.pipeline import (
    STAGES,
    PipelineSettings,
    dispositions,
    make_stages,
    run_pipeline,
)
from reframe_vl.data.record_parts import AnswerInfo, LabelledBox, MediaInfo
from reframe_vl.data.records import Record
from reframe_vl.data.stages.base import open_file
from reframe_vl.data.stages.looks import LookSettings
from reframe_vl.data.stages.runner import Unfinished
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.cache import AnswerCache
from reframe_vl.data.verifiers.endpoint import EndpointVerifier
from reframe_vl.rollout.vllm_environment import defaults
from reframe_vl.rollout.vllm_server import command_line
from reframe_vl.types import Modality
from vllm_models import ARGUMENTS, write_checkpoint

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}<|vision_start|><|image_pad|><|vision_end|>{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""
RECORDS = 16


class Server:
    """vLLM's own server, as a user starts it; the same port each time."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = ARGUMENTS | {"model": str(folder), "served_model_name": "tiny"}
        arguments |= {"max_model_len": 8192, "max_num_seqs": 8, "port": self.port}
        arguments |= {"host": "127.0.0.1", "chat_template": str(folder / "template.jinja")}
        module = "vllm.entrypoints.openai.api_server"
        self.command = [sys.executable, "-m", module, *command_line(arguments)]
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            self.command,
            env=os.environ | defaults(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self):
        while True:
            assert self.process.poll() is None, f"ended with {self.process.returncode}"
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://127.0.0.1:{self.port}/health").status_code == 200:
                    return
            time.sleep(0.5)

    def kill(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("verifier") / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "template.jinja").write_text(TEMPLATE)
    server = Server(folder)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    made = []
    for number in range(RECORDS):
        pixels = rng.integers(0, 256, (6, 8, 3), np.uint8)
        picture = Image.fromarray(pixels).resize((128, 96), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.png")
        made.append(
            Record(
                id=f"tiny/{number}",
                source="tiny",
                split="train",
                licence="none",
                raw={},
                modality=Modality.IMAGE,
                media=MediaInfo(path=str(folder / f"{number}.png"), width=128, height=96),
                question=f"Which digit is on sign {number}?",
                answer=AnswerInfo(kind="number", value=str(number % 10)),
                boxes=(LabelledBox(xyxy=(20, 20, 60, 60)),),
            )
        )
    return made


def run(records, work, server, max_tries, told=lambda stage, done: None):
    """Runs all stages; an untrained model answers with any digit."""
    settings = EndpointSettings(
        url=f"http://127.0.0.1:{server.port}/v1",
        model="tiny",
        max_tries=max_tries,
        backoff_s=0.5,
        longest_wait_s=5.0,
        max_tokens=64,
        concurrency=4,
        extra={"structured_outputs": {"regex": "<answer>[0-9]</answer>"}},
    )
    cache = AnswerCache(work / "answers.sqlite")
    try:
        asker = Asker(EndpointVerifier(settings), cache)
        looks = PipelineSettings(looks=LookSettings(128 * 128, 64 * 64))
        stages = make_stages(STAGES, looks, open_file, [asker])
        run_pipeline(stages, records, work, batch_size=4, progress=told)
    finally:
        cache.close()


@pytest.mark.long
def test_a_server_that_is_killed_and_started_again_costs_no_record(server, records, tmp_path):
    server.start()
    server.wait()
    judged = []

    def kill_after_a_batch(stage, done):
        judged.append((stage, done))
        if stage == "shortcut" and done:
            server.kill()

    with pytest.raises(Unfinished, match="run the same command again"):
        run(records, tmp_path, server, 1, kill_after_a_batch)
    assert ("shortcut", 4) in judged
    manifest = json.loads((tmp_path / "shortcut" / "manifest.json").read_text())
    assert not manifest["complete"] and manifest["asked"]["tiny"]["failures"]

    # The same command again, while the server is still down: requests wait until it is back.
    starting = threading.Timer(3.0, server.start)
    starting.start()
    begun = time.monotonic()
    run(records, tmp_path, server, 1000)
    starting.join()
    assert time.monotonic() - begun > 3
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in STAGES]
    assert all(manifest["complete"] for manifest in manifests)
    assert len(dispositions(tmp_path, STAGES)) == RECORDS
    assert manifests[1]["asked"]["tiny"]["retries"] > 0
