import numpy as np
import pytest
from vs_trl import WARM_SHAPE, Work, _compared, make_work, reward

from reframe_vl.mini.tokenizer import build_tokenizer
from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.encoding import Encoder
from reframe_vl.tools.codec import codec_for
from reframe_vl.types import Provenance, Quoted

BANNED = [0, 1, 2, 5, 300]


@pytest.mark.parametrize("shape", [WARM_SHAPE, (256, 4, 2)])
def test_prompts_have_exactly_the_wanted_number_of_tokens(shape):
    work = make_work(shape, 2, BANNED)
    maker = ViewMaker(16, 2, 2, 1024, 1024 * 1024, (0.5,) * 3, (0.5,) * 3)
    encoder = Encoder(build_tokenizer())
    for pixels, question in zip(work.images, work.questions, strict=True):
        parts = codec_for("qwen3_vl").prompt("", [maker.view(pixels), Quoted(str(question))])
        assert len(encoder.span(parts, Provenance.PROMPT)) == shape[0]


def test_given_rollouts_are_allowed_tokens_and_survive_a_file(tmp_path):
    work = make_work((64, 8, 4), 1, BANNED, given=True)
    work.save(tmp_path / "work.npz")
    read = Work.load(tmp_path / "work.npz")
    assert read.completions.shape == (4, 8) and not np.isin(read.completions, BANNED).any()
    assert (read.num_rollouts, read.num_tokens) == (4, 8)
    np.testing.assert_allclose(read.rewards, [reward(row) for row in work.completions], atol=1e-6)
    assert read.advantages.sum() == pytest.approx(0, abs=1e-5) and read.advantages.all()


def test_ratios_are_of_steps_that_ran_one_after_the_other():
    compared = _compared([1.0, 2.0, 4.0], [3.0, 6.0, 4.0], last=False)
    assert compared == {"ours": 2.0, "theirs": 4.0, "ratio": 3.0}
    assert _compared([1.0, 2.0], [1.0, 8.0], last=True)["ratio"] == 4.0
