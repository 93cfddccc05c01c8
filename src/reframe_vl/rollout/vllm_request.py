"""What is asked of vLLM and what it answers, whether it runs in this process or behind a server.

Tokens in, tokens out: vLLM gets a context's *unexpanded* ids, one placeholder an image, and the
images by content hash. It expands them itself; its expansion must be ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from reframe_vl.rollout.engine import Generation
from reframe_vl.types import Context, Modality, Sampling, View

_NEVER = -1e9
"""Added to a banned id's logit: its probability is 0 in float32, at any temperature in use."""

_NO_LOGPROB = -9998.0
"""vLLM's server writes -9999 where a log-prob is minus infinity or not a number."""

_SEEDS = 2**63


class ExpansionError(RuntimeError):
    """Engine and trainer do not read the same tokens: nothing that is sampled could be trained."""


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        token_ids: Unexpanded.
        views: The images of its placeholders, in order.
        parameters: vLLM's sampling parameters, by name.
    """

    token_ids: list[int]
    views: list[View]
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """What vLLM made of a request.

    Attributes:
        prompt_ids: The prompt as it was expanded.
        token_ids: Sampled.
        logprobs: Of the sampled tokens; None where there was none.
        finish: Why it stopped: ``stop`` or ``length``, else it was broken off.
        prompt_logprobs: Of each token of the prompt, the first one's None; empty unless asked for.
        versions: Of the weights that sampled it, as who pushed them named them.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish: str | None
    prompt_logprobs: Sequence[float | None] = ()
    versions: Sequence[str] = ()


def turn_request(context: Context, sampling: Sampling, seed: int) -> Request:
    """Asks for the next turn after a context.

    Raises:
        ValueError: The context cannot be shown to vLLM as it is.
    """
    return Request(
        context.token_ids,
        _images(context),
        {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            # The stop ids say where a turn ends, and nothing else does.
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(sampling.banned_ids, _NEVER),
            "seed": seed % _SEEDS,
            "logprobs": 0,
            "detokenize": False,
        },
    )


def score_request(context: Context) -> Request:
    """Asks how likely the tokens of a context are.

    Raises:
        ValueError: The context cannot be shown to vLLM as it is.
    """
    parameters = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return Request(context.token_ids, _images(context), parameters)


def generation(reply: Reply) -> Generation:
    """The turn that was sampled.

    Raises:
        ValueError: It was broken off, or its log-probs cannot be told apart.
    """
    finish: Literal["stop", "length"]
    match reply.finish:
        case "stop":
            finish = "stop"
        case "length":
            finish = "length"
        case _:
            raise ValueError(f"vLLM broke a request off (finish reason {reply.finish!r}).")
    if len(reply.logprobs) != len(reply.token_ids):
        raise ValueError(
            f"vLLM answered {len(reply.token_ids)} tokens with {len(reply.logprobs)} log-probs: "
            "which is whose cannot be told."
        )
    return Generation(tuple(reply.token_ids), tuple(map(known, reply.logprobs)), finish)


def known(logprob: float | None) -> float | None:
    """A log-prob, or None where vLLM gave none or one that cannot be."""
    if logprob is None or not math.isfinite(logprob) or logprob < _NO_LOGPROB:
        return None
    return logprob


def check_expansion(
    ours: npt.NDArray[np.int64], theirs: Sequence[int], views: Sequence[View]
) -> None:
    """Checks that vLLM read the tokens that the trainer will read.

    Raises:
        ExpansionError: It did not; the message names the first difference.
    """
    other = np.asarray(theirs, np.int64)
    if np.array_equal(ours, other):
        return
    length = min(len(ours), len(other))
    differing = np.flatnonzero(ours[:length] != other[:length])
    at = int(differing[0]) if len(differing) else length
    shown = ", ".join(f"{view.num_tokens} of grid {view.grid_thw}" for view in views) or "none"
    raise ExpansionError(
        f"vLLM expanded a prompt to {len(other)} tokens, the trainer to {len(ours)}; from position "
        f"{at} on vLLM has {other[at : at + 4].tolist()} and the trainer "
        f"{ours[at : at + 4].tolist()} (image tokens by the trainer: {shown}). Both must use one "
        "checkpoint's processor settings and leave images as they are: compare the model's "
        "processor_config.json with what the engine loaded, and start a server with "
        "reframe_vl.rollout.vllm_server."
    )


def _images(context: Context) -> list[View]:
    views = context.views
    for view in views:
        if view.modality is not Modality.IMAGE:
            raise ValueError(
                "vLLM writes the times of a native video itself, in another form than the trainer: "
                "set rollout.settings.prompt.video_as=frames, or rollout=hf."
            )
        if view.pixels is None:
            raise ValueError(f"View {view.hash} has no pixels: read rollouts with their images.")
    return views
