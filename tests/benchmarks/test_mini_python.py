import shutil

import numpy as np
import pytest
from mini_python import MiniPython, harm
from python_lessons import script

from reframe_vl.mini.video_world import MiniVideoWorld
from reframe_vl.mini.world import MiniWorld
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import codec_for
from reframe_vl.tools.python_exec import PythonRequest, PythonTool
from reframe_vl.types import Markup, Modality, Provenance
from tiny import tokenizer

IMAGE, VIDEO = MiniWorld().sample("test", 0), MiniVideoWorld().sample("test", 0)
CODES = {
    Modality.IMAGE: (
        "image_0.crop([v*.128 for v in(250,0,500,250)])",
        "show(image_0.crop((-10,0,200,64)))",
        "image_0.crop((5,5,5,5))",
        "image_0.crop([v*.128 for v in(250,0,500)])",
        "image_0.crop([v*.128 for v in(250,0",
        "image_1",
        "[1,2]",
    ),
    Modality.VIDEO: (
        "show(video[0:4])",
        "show(video[0:9])",
        "video[3]",
        "video[99]",
        "show(video.frames([1,1,2]))",
        "video.at(2.5)",
    ),
}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize("modality", Modality)
def test_harmless_code_gives_what_it_gives_in_the_sandbox(modality):
    media = (IMAGE if modality is Modality.IMAGE else VIDEO).media
    real, mini = PythonTool(modality, warm=1), MiniPython(modality)
    try:
        for code in CODES[modality]:
            request = PythonRequest("python", code=code)
            with real.session(media) as tool:
                expected = tool.run(request, media, 1024)
            found = mini.run(request, media, 1024)
            assert (found.text, found.failed) == (expected.text, expected.failed), code
            assert len(found.images) == len(expected.images), code
            for one, other in zip(found.images, expected.images, strict=True):
                assert np.array_equal(one.pixels, other.pixels), code
    finally:
        real.close()


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "().__class__",
        "open('x')",
        "image_0.save('x')",
        "9**9",
        "image_0.crop((0,0,99999,9))",
        "[0]*1000",
        "[v for v in(1,2) for w in(3,4)]",
        "lambda: 0",
        "f'{video}'",
        "while 1: pass",
        "show.__globals__",
        "__builtins__",
    ],
)
def test_code_that_is_not_on_the_list_does_not_run(code):
    assert harm(code)
    result = MiniPython("image").run(PythonRequest("python", code=code), IMAGE.media, 1024)
    assert result.failed and not result.images and "here" in result.text


@pytest.mark.parametrize("kind, sample", [("image", IMAGE), ("video", VIDEO)])
def test_scripts_fit_a_turn_and_their_code_runs(kind, sample):
    codec, encoder = codec_for("qwen3_vl", compact=True), Encoder(tokenizer())
    rng, tool = np.random.default_rng(0), MiniPython(sample.modality)
    lengths = set()
    for _ in range(20):
        *calls, answer = script(sample, kind, codec, rng)
        lengths.add(len(calls))
        assert codec.parse(answer, False).answers == (sample.answer.value,)
        for text in calls:
            assert len(encoder.span([Markup(text)], Provenance.EXTERNAL).token_ids) <= 96
            code = codec.parse(text, False).call.arguments["code"]
            result = tool.run(PythonRequest("python", code=code), sample.media, 1024)
            assert result.images and not result.failed
    assert len(lengths) > 1
