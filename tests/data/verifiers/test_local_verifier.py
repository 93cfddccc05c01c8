from collections.abc import Sequence

import pytest
from PIL import Image

from reframe_vl.data.media import ImageFile
from reframe_vl.data.verifiers.asker import Asker
from reframe_vl.data.verifiers.base import Picture, Query, Reply
from reframe_vl.data.verifiers.questions import read_answer
from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.policy.loading import Policy
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.rollout.engine import EngineError, Generation
from reframe_vl.rollout.hf_engine import HFEngine
from reframe_vl.rollout.verifier import LocalVerifier
from reframe_vl.tools.codec import codec_for
from reframe_vl.types import Context, Sampling
from tiny import tiny_model, tokenizer


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny_model("qwen3_vl"), tokenizer(), codec_for("qwen3_vl"), "tiny")


class SayingEngine:
    """Says the same in each session, and keeps what it was shown."""

    def __init__(self, text: str, finish: str = "stop") -> None:
        self.text, self.finish = text, finish
        self.contexts: list[Context] = []
        self.sampling: Sampling | None = None
        self.opened: list[str] = []
        self.released: list[str] = []

    def open(self, sessions: Sequence[str]) -> None:
        self.opened += sessions

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        self.contexts.append(context)
        self.sampling = sampling
        if not self.text:
            raise EngineError("out of memory")
        ids = tuple(tokenizer()(self.text, add_special_tokens=False)["input_ids"])
        return Generation(ids, (None,) * len(ids), self.finish)

    def release(self, session: str) -> None:
        self.released.append(session)

    def close(self) -> None:
        pass


def queries() -> list[Query]:
    video = MiniVideoWorld().sample("t", 0).media
    pictures = tuple(Picture(video, 1024, frame=frame) for frame in (2, 5))
    return [Query("What digit is it?", pictures), Query("Is it red?"), Query("Is it 7?")]


def test_pictures_times_and_words_are_shown_and_the_answer_is_read(policy) -> None:
    engine = SayingEngine("So.<answer>7</answer><|im_end|>")
    verifier = LocalVerifier(policy, engine, "tiny", max_concurrent=2)
    replies = Asker(verifier).ask(queries())
    assert [read_answer(reply.text or "") for reply in replies] == ["7"] * 3
    first = engine.contexts[0]
    text = Encoder(tokenizer()).decode(first.token_ids)
    assert len(first.views) == 2 and text.index("<2.0 seconds>") < text.index("<5.0 seconds>")
    assert text.index("<5.0 seconds>") < text.index("What digit is it?")
    assert engine.sampling is not None and engine.sampling.temperature == 0
    assert engine.opened == engine.released and replies[0].prompt_tokens == len(first)


def test_an_engine_that_fails_a_cut_answer_and_a_broken_file_are_no_verdicts(
    policy, tmp_path
) -> None:
    def failures(engine: SayingEngine, asked: list[Query]) -> list[str]:
        found: list[Reply] = Asker(LocalVerifier(policy, engine, "tiny")).ask(asked)
        return [reply.failure[0] if reply.failure else "" for reply in found]

    assert failures(SayingEngine(""), queries()[1:]) == ["engine"] * 2
    assert failures(SayingEngine("So it", "length"), queries()[1:]) == ["truncated"] * 2
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    image = ImageFile(tmp_path / "a.png")
    assert image.key
    (tmp_path / "a.png").write_bytes(b"no image")
    broken = Query("Is it blue?", (Picture(image, 100),))
    engine = SayingEngine("<answer>yes</answer>")
    assert failures(engine, [broken, queries()[1]]) == ["media", ""]


def test_the_real_engine_answers_alike_however_many_are_asked_at_once(policy) -> None:
    def ids(max_concurrent: int) -> list[tuple[str | None, int]]:
        engine = HFEngine(policy.model)
        verifier = LocalVerifier(policy, engine, "tiny", 4, max_concurrent)
        found = dict(verifier.answer(queries()))
        return [(found[n].text, found[n].completion_tokens) for n in range(3)]

    assert ids(1) == ids(3)
