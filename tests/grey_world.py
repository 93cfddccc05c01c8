"""A world and an engine whose answers can be foretold, to test the arms by."""

import re
from dataclasses import dataclass, field

import numpy as np

from reframe_vl.data.media import MediaError
from reframe_vl.evaluation.protocols import Evaluator
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import EngineError, Generation
from reframe_vl.rollout.episode import Budget
from reframe_vl.rollout.prompt import PromptSettings
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.registry import default_tools
from reframe_vl.types import Answer, Evidence, ImageMedia, Modality, Sample, VideoMedia
from tiny import sampling, tiny_model, tokenizer

SIDE = 64
BOX = (8.0, 8.0, 24.0, 24.0)
STEP = 25
"""Grey levels a digit; the constant image reads as 5."""
BACKGROUND = 9


def paint(digit, height, width):
    return np.full((height, width, 3), digit * STEP + STEP // 2, np.uint8)


def read(pixels):
    return int(np.median(pixels)) // STEP


@dataclass(frozen=True)
class GreyImage(ImageMedia):
    """The whole view shows one digit, the evidence another, all else a third."""

    name: str
    whole: int
    evidence: int
    boxes: tuple = (BOX,)
    broken: str = ""

    @property
    def key(self):
        return self.name

    @property
    def size(self):
        return (SIDE, SIDE)

    def look(self, box, max_pixels):
        if self.broken == ("whole" if box is None else "crop"):
            raise MediaError(f"{self.name} cannot be read.")
        if box is None:
            return paint(self.whole, SIDE, SIDE)
        canvas = paint(BACKGROUND, SIDE, SIDE)
        for x0, y0, x1, y1 in (map(int, b) for b in self.boxes):
            canvas[y0:y1, x0:x1] = paint(self.evidence, y1 - y0, x1 - x0)
        x0, y0, x1, y1 = (round(v) for v in box)
        return canvas[y0:y1, x0:x1]


@dataclass(frozen=True)
class GreyVideo(VideoMedia):
    name: str
    digits: tuple

    @property
    def key(self):
        return self.name

    @property
    def size(self):
        return (32, 32)

    @property
    def timestamps_s(self):
        return tuple(float(i) for i in range(len(self.digits)))

    def look(self, frames, max_pixels):
        return [paint(self.digits[i], 32, 32) for i in frames]


def image_sample(name, whole=1, evidence=2, answer=2, boxes=(BOX,), broken=""):
    media = GreyImage(name, whole, evidence, boxes, broken)
    evidence_boxes = Evidence(boxes=boxes)
    answer = Answer("number", str(answer))
    return Sample(name, Modality.IMAGE, media, "What digit is it?", answer, evidence=evidence_boxes)


def video_sample(name, digits, segments, answer):
    evidence = Evidence(segments=segments)
    media = GreyVideo(name, digits)
    answer = Answer("number", str(answer))
    return Sample(name, Modality.VIDEO, media, "What digit is it?", answer, evidence=evidence)


@dataclass
class ReadingEngine:
    """A policy that looks once where it may call a tool, then answers what it saw last.

    Attributes:
        calls: Whether it ever calls.
        fails: Ids of samples on which the engine fails.
        seen: Contexts and sampling of every request, by session, in order.
    """

    calls: bool = True
    fails: frozenset = frozenset()
    seen: list = field(default_factory=list)
    box: tuple = (125, 125, 375, 375)

    def open(self, sessions):
        pass

    async def generate(self, session, context, how, seed):
        spans = list(context.spans)
        self.seen.append((session, spans, how))
        if session.split("/", 1)[1] in self.fails:
            raise EngineError("The engine is out of order.")
        tok = tokenizer()
        may_call = tok.convert_tokens_to_ids("<tool_call>") not in how.banned_ids
        if self.calls and may_call and len(spans) == 1:
            text = CODEC.render_call("CropImage", {"bbox_2d": list(self.box)})
        else:
            text = CODEC.render_answer(str(read(context.views[-1].pixels)))
        ids = tuple(tok(text, add_special_tokens=False)["input_ids"])
        return Generation(ids, (0.0,) * len(ids), "stop")

    def release(self, session):
        pass

    def close(self):
        pass


CODEC = codec_for("qwen3_vl", compact=True)


def evaluator(engine=None, budget=None, prompts=None, model=None, **kw):
    return Evaluator(
        model or tiny_model("qwen3_vl"),
        CODEC,
        Encoder(tokenizer()),
        default_tools(),
        prompts or PromptSettings(),
        budget or Budget(),
        sampling(temperature=1.0, max_new_tokens=40),
        engine=engine,
        **kw,
    )


def text_of(spans):
    decoded = tokenizer().decode([t for span in spans for t in span.token_ids])
    return re.sub(r"\s+", " ", decoded)
