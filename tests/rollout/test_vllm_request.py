import math

import numpy as np
import pytest

from reframe_vl.policy.views import ViewMaker
from reframe_vl.rollout.vllm_request import (
    ExpansionError,
    Reply,
    check_expansion,
    generation,
    score_request,
    turn_request,
)
from reframe_vl.types import Context, Provenance, Sampling, Span

MAKER = ViewMaker(8, 2, 2, 256, 4096, (0.5,) * 3, (0.5,) * 3)


def view(height=32, width=48, shade=0):
    return MAKER.view(np.full((height, width, 3), shade, np.uint8))


def context(*views):
    return Context([Span(Provenance.PROMPT, (1, *[7] * len(views), 2), views=views)])


def test_a_request_holds_unexpanded_ids_and_each_placeholders_image():
    first, second = view(), view(shade=9)
    request = turn_request(context(first, second), Sampling(), 0)
    assert request.token_ids == [1, 7, 7, 2]
    assert [v.hash for v in request.views] == [first.hash, second.hash]


def test_b09_banned_ids_have_no_probability_and_stop_ids_alone_end_a_turn():
    sampling = Sampling(0.7, 5, banned_ids=(3, 4), stop_ids=(2,))
    parameters = turn_request(context(), sampling, 1).parameters
    assert parameters["logit_bias"].keys() == {3, 4}
    assert all(np.exp(np.float32(b)) == 0 for b in parameters["logit_bias"].values())
    assert parameters["stop_token_ids"] == [2] and parameters["ignore_eos"]
    assert parameters["max_tokens"] == 5 and parameters["temperature"] == 0.7


def test_seeds_of_any_size_fit_and_stay_apart():
    seeds = {turn_request(context(), Sampling(), 2**127 + i).parameters["seed"] for i in range(9)}
    assert len(seeds) == 9 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("missing", [None, math.nan, -math.inf, -9999.0])
def test_c14_a_log_prob_that_cannot_be_is_none(missing):
    turn = generation(Reply([1], [5, 6], [-0.25, missing], "stop"))
    assert turn.logprobs == (-0.25, None)


@pytest.mark.parametrize("given", [[], [-1.0], [-1.0] * 3])
def test_c14_log_probs_that_cannot_be_told_apart_are_refused(given):
    with pytest.raises(ValueError, match="2 tokens with"):
        generation(Reply([1], [5, 6], given, "stop"))


def test_a_turn_that_was_broken_off_is_no_turn():
    with pytest.raises(ValueError, match="abort"):
        generation(Reply([1], [5], [-1.0], "abort"))


def test_b08_a_differing_expansion_is_refused_and_named():
    ours = np.asarray([1, 7, 7, 2])
    check_expansion(ours, [1, 7, 7, 2], [])
    with pytest.raises(ExpansionError, match="to 5 tokens, the trainer to 4; from position 3"):
        check_expansion(ours, [1, 7, 7, 7, 2], [view()])
    with pytest.raises(ExpansionError, match="from position 4"):
        check_expansion(ours, [1, 7, 7, 2, 2], [])


def test_native_video_is_refused_with_the_remedy():
    frames = [np.zeros((16, 16, 3), np.uint8)] * 2
    video = MAKER.video(frames, [0.0, 1.0])
    with pytest.raises(ValueError, match="video_as=frames"):
        turn_request(context(video), Sampling(), 0)


def test_a_context_without_its_pixels_is_refused():
    import dataclasses

    with pytest.raises(ValueError, match="no pixels"):
        score_request(context(dataclasses.replace(view(), pixels=None)))
