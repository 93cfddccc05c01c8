"""Episodes with tools that keep state and return words, and with Python in its sandbox."""

import asyncio
import copy
import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from grey_world import video_sample
from reframe_vl.evaluation.controls import ForcedCalls
from reframe_vl.rollout.collector import Plan
from reframe_vl.rollout.engine import Generation
from reframe_vl.rollout.episode import Budget, Episode
from reframe_vl.rollout.gate import Gate
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.tools.base import (
    Reason,
    Refusal,
    Scene,
    StatefulTool,
    Tool,
    ToolImage,
    ToolRequest,
    ToolResult,
    ToolUnavailableError,
)
from reframe_vl.tools.coordinates import CoordinateFrame
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.python_exec import PythonRequest, PythonTool
from reframe_vl.types import CallStatus, Evidence, Media, Modality, Provenance, Termination
from scripted import END, EngineError, ScriptedEngine, call, collector, sample
from tiny import sampling, tiny_model, tokenizer

ANSWER = f"<answer>7</answer>{END}"
needs_sandbox = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed (apt-get install bubblewrap)"
)


class Notebook(StatefulTool):
    """A tool that writes down what it is told and says all that it was told in its session."""

    name = "python"
    modality = Modality.IMAGE

    def __init__(self, act=lambda code: None) -> None:
        self.act = act
        self.notes: list[str] | None = None
        self.opened: list[Notebook] = []
        self.closed = 0

    def schema(self, frame: CoordinateFrame) -> dict[str, Any]:
        return {}

    def check(self, arguments: Mapping[str, Any], scene: Scene) -> ToolRequest | Refusal:
        return PythonRequest(self.name, code=arguments["code"])

    def run(self, request: ToolRequest, media: Media, max_pixels: int) -> ToolResult:
        assert isinstance(request, PythonRequest) and self.notes is not None
        assert threading.current_thread().name != "rollouts", "the event loop waits"
        self.notes.append(request.code)
        self.act(request.code)
        image = ToolImage(np.full((32, 32, 3), len(self.notes), np.uint8))
        failed = request.code.startswith("fail")
        return ToolResult((image,), text=" ".join(self.notes), failed=failed)

    @contextmanager
    def session(self, media: Media) -> Iterator[Tool]:
        tool = copy.copy(self)
        tool.notes = []
        self.opened.append(tool)
        yield tool
        self.closed += 1

    def close(self) -> None:
        pass

    def canonical(self, evidence: Evidence, scene: Scene) -> list[dict[str, Any]]:
        return [{"code": str(box)} for box in evidence.boxes]


def code(text: str) -> str:
    call = json.dumps({"name": "python", "arguments": {"code": text}})
    return f"<tool_call>{call}</tool_call>{END}"


def play(*lines, tools, of=None, count=1, drop=0.0, gate=None, engine=None, **kwargs):
    engine = engine or ScriptedEngine(*lines)
    made = collector(engine, tools=tools, **kwargs)
    plan = Plan(0, count, sampling(max_new_tokens=64), drop_probability=drop, gate=gate)
    try:
        [group] = made.collect([of or sample()], plan)
    finally:
        made.loop.stop()
    return group.rollouts if count > 1 else group.rollouts[0]


def observed(rollout):
    spans = [s for s in rollout.contexts[-1].spans if s.provenance is Provenance.OBSERVED]
    return [tokenizer().decode(span.token_ids) for span in spans]


# --------------------------------------------------------------------------- state and words


def test_a_rollouts_calls_build_on_each_other_and_rollouts_share_nothing():
    tool = Notebook()
    rollouts = play(code("a"), code("b"), ANSWER, tools=[tool], count=3)
    for rollout in rollouts:
        first, second = observed(rollout)
        assert "a<|vision_start|>" in first and "a b<|vision_start|>" in second
        assert [c.arguments for c in rollout.calls] == [{"code": "a"}, {"code": "b"}]
    assert len(tool.opened) == tool.closed == 3


def test_the_same_code_is_run_again():
    rollout = play(code("a"), code("a"), ANSWER, tools=[Notebook()])
    assert [c.status for c in rollout.calls] == [CallStatus.OK] * 2
    assert "a a" in observed(rollout)[1]


@pytest.mark.parametrize("failed", [False, True])
def test_long_words_keep_their_beginning_and_a_tracebacks_its_end(failed):
    words = ("fail" if failed else "fine") + " begin " + "x" * 200 + " end"
    budget = Budget(max_tool_text_tokens=20, tool_view_pixels=1024)
    rollout = play(code(words), ANSWER, tools=[Notebook()], budget=budget)
    [text] = observed(rollout)
    assert ("begin" in text, "end<|vision" in text) == (not failed, failed)
    span = next(s for s in rollout.contexts[0].spans if s.provenance is Provenance.OBSERVED)
    assert len(span.token_ids) < 60


def test_code_that_raised_was_executed_but_is_no_success_that_drops_the_original():
    rollout = play(code("fail"), code("a"), ANSWER, tools=[Notebook()], drop=1.0)
    assert [c.reason for c in rollout.calls] == [Reason.CODE_RAISED, ""]
    assert [c.status for c in rollout.calls] == [CallStatus.OK] * 2
    before, after = rollout.contexts
    # The original, and what the failed code showed.
    assert len(before.views) == 2
    assert len(after.views) == 2
    assert not play(code("fail"), ANSWER, tools=[Notebook()], drop=1.0).dropped


# --------------------------------------------------------------------------- whatever happens


def test_what_a_tool_runs_on_failing_ends_the_rollout_unscored_and_its_session():
    def act(word):
        if word == "broken":
            raise ToolUnavailableError("no interpreter")

    tool = Notebook(act)
    rollout = play(code("a"), code("broken"), ANSWER, tools=[tool])
    assert rollout.termination is Termination.ERROR and rollout.error == "no interpreter"
    assert not rollout.played
    assert tool.closed == 1


@pytest.mark.parametrize("failure", [EngineError("out of order"), ZeroDivisionError()])
def test_sessions_are_closed_whatever_happens(failure):
    class Closing(Notebook):
        @contextmanager
        def session(self, media):
            try:
                with super().session(media) as tool:
                    yield tool
            except BaseException:
                self.closed += 1
                raise

    tool = Closing()
    try:
        play(code("a"), failure, tools=[tool], count=2)
    except ExceptionGroup as group:
        assert group.subgroup(ZeroDivisionError)
    assert tool.closed == 2


def test_a_long_call_stalls_no_other_rollout():
    both = threading.Barrier(2)
    rollouts = play(code("a"), ANSWER, tools=[Notebook(lambda _: both.wait(20))], count=2)
    assert [r.termination for r in rollouts] == [Termination.ANSWERED] * 2


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_what_decodes_together_does_not_depend_on_how_long_calls_take(slow):
    class Waves(HFEngine):
        def _generate(self, requests):
            waves.append([request.session for request in requests])
            ids = tuple(tokenizer()(code("a") if len(waves) < 3 else ANSWER)["input_ids"])
            return [Generation(ids, (0.0,) * len(ids), "stop")] * len(requests)

    waves: list[list[str]] = []
    order = itertools.count()
    tool = Notebook(lambda _: time.sleep(0.1 if next(order) % 3 == slow else 0.0))
    play(tools=[tool], count=3, engine=Waves(tiny_model("qwen3_vl")))
    assert waves == [[f"{i}/{sample().id}" for i in range(3)]] * 3


def test_a_cancelled_rollout_ends_its_session_while_a_call_runs():
    started, ended = threading.Event(), threading.Event()

    def act(_):
        started.set()
        ended.wait(20)

    class Ending(Notebook):
        @contextmanager
        def session(self, media):
            with Notebook.session(self, media) as tool:
                try:
                    yield tool
                finally:
                    ended.set()

    async def cancel():
        made = collector(ScriptedEngine(code("a")), tools=[Ending(act)])
        made.loop.stop()
        [episode] = made._episodes(sample(), Plan(0, 1, sampling(max_new_tokens=64)), 0)
        assert isinstance(episode, Episode)
        task = asyncio.create_task(episode.run(made.engine, "s"))
        await asyncio.to_thread(started.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(cancel())


# --------------------------------------------------------------------------- beside other tools


def test_the_gate_lets_code_stand_and_asks_for_no_code():
    of = sample()
    far = "Let me look. " + call(0, 0, 30, 30)
    rollout = play(code("a"), far, ANSWER, tools=[Notebook(), CropImage()], of=of, gate=Gate())
    assert [(c.name, c.status, c.by_gate) for c in rollout.calls] == [
        ("python", CallStatus.OK, False),
        ("CropImage", CallStatus.REPLACED, False),
        ("CropImage", CallStatus.OK, True),
    ]


def test_calls_are_never_forced_on_a_tool_that_keeps_state():
    made = collector(ScriptedEngine(ANSWER))
    made.loop.stop()
    [episode] = made._episodes(sample(), Plan(0, 1, sampling()), 0)
    assert not ForcedCalls([Notebook()], 1024).calls(sample(), episode.prompt)
    [(tool, _)] = ForcedCalls([Notebook(), CropImage()], 1024).calls(sample(), episode.prompt)
    assert tool.name == "CropImage"


# --------------------------------------------------------------------------- Python


def test_the_minis_tokenizer_can_write_code():
    text = code('crop = image_0.crop((0, 0, 8, 8))\nfor i in range(2):\n\tshow(crop)  # "é"\n')
    assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


@pytest.fixture(scope="module")
def python() -> Iterator[list[PythonTool]]:
    tools = [PythonTool(modality, warm=1) for modality in Modality]
    assert all(isinstance(tool, StatefulTool) for tool in tools)
    yield tools
    for tool in tools:
        tool.close()


@needs_sandbox
def test_code_looks_at_the_original_image_and_remembers(python):
    lines = (
        code("crop = image_0.crop((0, 0, 32, 32))\nprint(crop.size)"),
        code("show(crop)"),
        code("crop.nothing"),
        ANSWER,
    )
    rollout = play(*lines, tools=python, budget=Budget(max_turns=4, tool_view_pixels=1024))
    sized, shown, raised = observed(rollout)
    assert "(32, 32)" in sized
    assert "<|image_pad|>" in shown
    assert "AttributeError" in raised and rollout.calls[2].reason == Reason.CODE_RAISED
    crop = rollout.contexts[0].views[1].pixels
    width, height = sample().media.size
    assert (crop == sample().media.look(None, width * height)[:32, :32]).all()


@needs_sandbox
def test_a_video_on_demand_is_seen_by_code_alone(python):
    of = video_sample("v", (1, 2, 3, 4), ((2,),), 3)
    rollout = play(
        code("len(video), video.fps"),
        code("show(video[2])"),
        ANSWER,
        tools=python,
        of=of,
        prompts=PromptSettings(on_demand_video=True, frame_hint=False, show_tools=False),
    )
    assert not rollout.contexts[0].spans[0].views
    told, shown = observed(rollout)
    assert "(4, 1.0)" in told and "<|image_pad|>" in shown
    [view] = rollout.contexts[0].views
    assert (view.pixels == of.media.look([2], 1024)[0]).all()


@needs_sandbox
def test_python_is_found_by_name_and_modality(python):
    rollout = play(code("image_0.size"), ANSWER, tools=list(reversed(python)))
    assert rollout.calls[0].status is CallStatus.OK


@needs_sandbox
def test_a_session_that_is_over_starts_no_interpreter():
    tool = PythonTool("image", warm=0)
    with tool.session(sample().media) as session:
        pass
    with pytest.raises(ToolUnavailableError, match="ended before"):
        session.run(PythonRequest("python", code="1"), sample().media, 1024)
    tool.close()
    rollout = play(code("1"), ANSWER, tools=[tool])
    assert rollout.termination is Termination.ERROR and "closed" in rollout.error
