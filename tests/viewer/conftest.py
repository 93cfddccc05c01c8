"""A recorded run with what a model may write at its worst, and a browser to open its page in."""

import base64
import hashlib
import html
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.world import MiniWorld
from reframe_vl.rollout.store import RolloutStore
from reframe_vl.types import (
    CallRecord,
    CallStatus,
    Context,
    Provenance,
    Rollout,
    RolloutGroup,
    RolloutKey,
    Sample,
    Sampling,
    Span,
    Termination,
    View,
)
from reframe_vl.viewer.__main__ import main
from tiny import tokenizer

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
LONG = "lorem ipsum " * 4200
RIGHT_TO_LEFT = "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u0633\u0644\u0627\u0645"
ASKED = CallRecord(
    0,
    "CropImage",
    {"bbox_2d": [0, 0, 500, 500]},
    CallStatus.OK,
    boxes=((0.0, 0.0, 64.0, 64.0),),
)
REPLACED = CallRecord(
    0,
    "CropImage",
    {"bbox_2d": [9, 9, 99, 99]},
    CallStatus.REPLACED,
    reason="below_threshold",
    proposal=HOSTILE,
)


def decode(token_ids):
    return tokenizer().decode(token_ids, skip_special_tokens=False)


def encode(text):
    return tuple(tokenizer()(text, add_special_tokens=False)["input_ids"])


def view(seed, side=32):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return View.of(pixels, (1, side // 8, side // 8), 16)


def prompt(sample, *views):
    places = "<|vision_start|><|image_pad|><|vision_end|>" * len(views)
    text = f"<|im_start|>user\n{places}{sample.question}<|im_end|>\n<|im_start|>assistant\n"
    return Span(Provenance.PROMPT, encode(text), views=views)


def sampled(text, provenance=Provenance.SAMPLED, teacher=None):
    ids = encode(text)
    logprobs = (-0.5,) * len(ids) if provenance is Provenance.SAMPLED else None
    taught = None if teacher is None else (teacher,) * len(ids)
    return Span(provenance, ids, logprobs, teacher_logprobs=taught)


def rollout(
    sample: Sample, index: int, spans: list[Span], step: int = 0, **changes: Any
) -> Rollout:
    values: dict[str, Any] = {
        "termination": Termination.ANSWERED,
        "answers": ["7"],
        "num_turns": 1,
        "rewards": {"answer": 1.0, "grounding": 0.25, "penalty": 0.0},
        "reward": 1.0,
        "advantage": 0.5,
    }
    key = RolloutKey(0, step, sample.id, index)
    return Rollout(key, [Context(spans)], Sampling(stop_ids=(2,)), **(values | changes))


def odd_group(step: int) -> RolloutGroup:
    """Rollouts of one image sample, each with something that may go wrong."""
    sample = MiniWorld().sample("train", 0)
    first = prompt(sample, view(0))
    crop = Span(
        Provenance.OBSERVED,
        encode("\n<tool_response><|vision_start|><|image_pad|><|vision_end|></tool_response>"),
        views=(view(1 + step),),
    )
    said = sampled(f"{HOSTILE}<|im_end|>", teacher=-1.0)
    dropped = rollout(
        sample,
        1,
        [first, said, crop],
        step,
        calls=[ASKED],
        drop_assigned=True,
        reward=0.25,
        advantage=-1.5,
        rewards={"answer": 0.0, "grounding": None, "penalty": float("nan")},
        answers=["\ud800 odd", HOSTILE],
    )
    dropped.contexts.append(Context([prompt(sample), replace(said, carried=True), crop]))
    gated = rollout(
        sample,
        2,
        [first, sampled("look "), sampled("<tool_call>", Provenance.INJECTED), crop],
        step,
        calls=[REPLACED, replace(ASKED, by_gate=True)],
        reward=None,
        advantage=None,
        rewards={"answer": None},
        answers=[],
        termination=Termination.ERROR,
        error=HOSTILE,
        branches=[Context([replace(first, carried=True), sampled("<x>", Provenance.INJECTED)])],
    )
    long = rollout(sample, 3, [first, sampled(LONG)], step, reward=float("inf"))
    return RolloutGroup(
        sample,
        [
            rollout(sample, 0, [first, sampled(f"{RIGHT_TO_LEFT}<|im_end|>")], step),
            dropped,
            gated,
            long,
        ],
    )


def video_group(step: int) -> RolloutGroup:
    sample = MiniVideoWorld().sample("train", 0)
    views = tuple(view(100 + i, 16) for i in range(len(sample.media.timestamps_s)))
    call = CallRecord(0, "SelectFrames", {"frames": [1]}, CallStatus.OK, frames=(1,))
    spans = [prompt(sample, *views), sampled("<answer>7</answer><|im_end|>")]
    return RolloutGroup(sample, [rollout(sample, 0, spans, step, calls=[call])])


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of rollouts, of which one image is missing and one is damaged."""
    folder = tmp_path_factory.mktemp("runs") / "odd <b>name" / "run"
    store = RolloutStore(folder / "rollouts")
    for step in (0, 3):
        store.write(step, [odd_group(step), video_group(step)], decode)
    images = folder / "rollouts" / "images"
    broken, missing = view(1).hash, view(4).hash
    (images / broken[:2] / f"{broken}.png").write_bytes(b"not a PNG")
    (images / missing[:2] / f"{missing}.png").unlink()
    (folder / "policy").mkdir()
    tokenizer().save_pretrained(folder / "policy")
    (folder / "config.yaml").write_text(
        "steps: 10\nreward: {_target_: reframe_vl.rewards.total.RewardWeights, grounding: 0.0}\n"
    )
    return folder


@pytest.fixture(scope="session")
def page(run: Path) -> str:
    return main([str(run)]).read_text(encoding="utf-8")


Drive = Callable[[str, str], dict[str, Any]]

WAITING = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const until = async (test) => {
  for (let i = 0; i < 2000 && !test(); i++) await wait(10);
  if (!test()) throw Error(`waited in vain for ${test}`);
};
const press = async (key) => {
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  await wait(50);
};
const all = (selector) => [...document.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const fill = async (name, value) => {
  const field = one("#filters").elements[name];
  field.value = value;
  field.dispatchEvent(new Event("input", {bubbles: true}));
  await wait(200);
};
"""


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    """Opens a page in Chromium, runs a script's lines in it, and gives what they put in ``got``."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("No chromium: apt-get install chromium.")

    def run_script(page: str, lines: str) -> dict[str, Any]:
        script = f"""{WAITING}
const got = {{}};
try {{
  await until(() => document.documentElement.dataset.openedMs && one("#detail .turns"));
  {lines}
}} catch (error) {{ got.error = String(error); }}
const report = document.createElement("pre");
report.id = "report";
report.textContent = JSON.stringify(got);
document.body.replaceChildren(report);
"""
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        page = page.replace("script-src '", f"script-src 'sha256-{digest}' '", 1)
        page = page.replace("</body>", f'<script type="module">{script}</script></body>')
        file = tmp_path / "page.html"
        file.write_text(page, encoding="utf-8")
        command = [browser, "--headless", "--disable-gpu", "--virtual-time-budget=60000"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900"]
        result = subprocess.run(
            [*command, "--dump-dom", file.as_uri()],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        _, found, rest = result.stdout.partition('<pre id="report">')
        assert found, result.stdout[-2000:] + result.stderr[-2000:]
        got = json.loads(html.unescape(rest.partition("</pre>")[0]))
        assert "error" not in got, got["error"]
        return got

    return run_script
