"""An engine that says what it is told, and an environment to say it in."""

from reframe_vl.mini.world import MiniWorld
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.collector import Collector, EventLoopThread
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import EngineError, Generation
from reframe_vl.rollout.episode import Budget, Environment
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.crop_image import CropImage
from reframe_vl.tools.select_frames import SelectFrames
from tiny import tokenizer

END = "<|im_end|>"


def call(x0=0, y0=0, x1=250, y1=250):
    arguments = f'{{"bbox_2d":[{x0},{y0},{x1},{y1}]}}'
    return f'<tool_call>{{"name":"CropImage","arguments":{arguments}}}</tool_call>{END}'


class ScriptedEngine:
    """Gives each session its next line; a line without an end token was cut by the limit."""

    def __init__(self, *lines):
        self.lines = lines
        self.turns = {}
        self.contexts = []
        self.live = set()

    def open(self, sessions):
        self.live |= set(sessions)

    async def generate(self, session, context, sampling, seed):
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.contexts.append([*context.spans])
        line = self.lines[min(turn, len(self.lines) - 1)]
        if isinstance(line, Exception):
            raise line
        ids = tuple(tokenizer()(line, add_special_tokens=False)["input_ids"])
        return Generation(ids, (-0.5,) * len(ids), "stop" if line.endswith(END) else "length")

    def release(self, session):
        self.live.discard(session)

    def close(self):
        self.live.clear()


def collector(engine, budget=None, prompts=None, run_tool=None, tools=None, codec=None):
    maker = ViewMaker(8, 1, 1, 256, 4096, (0.5,) * 3, (0.5,) * 3)
    environment = Environment(
        codec=codec or codec_for("qwen3_vl", compact=True),
        encoder=Encoder(tokenizer()),
        view_maker=maker,
        tools=tools or [CropImage(), SelectFrames()],
        budget=budget or Budget(tool_view_pixels=1024),
        run_tool=run_tool or (lambda tool, request, media: tool.run(request, media, 1024)),
    )
    return Collector(
        engine, environment, prompts or PromptSettings(view_pixels=1024), EventLoopThread()
    )


def sample(index=0):
    return MiniWorld().sample("test", index)


__all__ = ["END", "EngineError", "ScriptedEngine", "call", "collector", "sample"]
