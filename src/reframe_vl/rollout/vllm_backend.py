"""Where vLLM runs: the few things that an engine asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_request import Reply, Request

WORKER_EXTENSION = "reframe_vl.rollout.vllm_worker.WeightSync"

FIXED_ARGUMENTS = {
    "worker_extension_cls": WORKER_EXTENSION,
    # Log-probs of the distribution that tokens are drawn from (docs/architecture.md).
    "logprobs_mode": "processed_logprobs",
    # Views have their final size: resizing them again would show vLLM other images.
    "mm_processor_kwargs": {"do_resize": False},
    "use_tqdm_on_load": False,
}
"""vLLM's engine arguments that the trainer relies on."""

_OF_CHECKPOINT = "default"
"""What vLLM names the weights that it was started with."""


class EngineDown(EngineError):
    """vLLM died or cannot be reached; a new start may help."""


class OtherWeightsError(RuntimeError):
    """An engine sampled with weights that another run has put there: nothing it says is ours."""


@runtime_checkable
class Backend(Protocol):
    """A vLLM."""

    async def start(self) -> None:
        """Starts it, or waits for it; a dead one is started anew.

        Raises:
            EngineError: It cannot be started; the message names the remedy.
        """

    async def generate(self, request: Request) -> Reply:
        """Answers a request; cancelling this drops it in vLLM too.

        Raises:
            EngineDown: vLLM is gone.
            EngineError: It refused the request.
        """

    async def load_weights(self, folder: Path) -> None:
        """Takes all weights from a folder of safetensors, and forgets what old ones left.

        Raises:
            EngineDown: vLLM is gone.
            EngineError: It could not load them.
        """

    async def load_adapter(self, folder: Path) -> None:
        """Puts a LoRA adapter in the place of the one before, likewise; the base stays as it is.

        Raises:
            EngineDown: vLLM is gone.
            EngineError: It could not load it.
        """

    async def serves(self, folder: Path) -> bool:
        """Whether it has the weights from a folder: the connection alone may have broken.

        Raises:
            EngineDown: vLLM is gone.
        """

    async def rest(self) -> None:
        """Frees the accelerator's memory until the next weights come, where that is safe."""

    def stop(self) -> None:
        """Ends it, whatever state it is in."""


def default_arguments() -> dict[str, Any]:
    """Engine arguments of vLLM that are needed where they are not given."""
    # On a CPU vLLM cannot take a seed's draw back, as it has to after a part of a prompt.
    return {} if torch.cuda.is_available() else {"enable_chunked_prefill": False}


def check_versions(pushed: str, found: Sequence[str]) -> None:
    """Checks that an answer was sampled with the weights that were pushed.

    Args:
        pushed: What they were named; empty where this process has pushed none.
        found: The names that vLLM gave with the answer.

    Raises:
        EngineDown: With its checkpoint's: it was started again since, and nobody noticed.
        OtherWeightsError: With weights that somebody else pushed.
    """
    others = [version for version in found if version != pushed]
    if not pushed or not others:
        return
    if others[0] == _OF_CHECKPOINT:
        raise EngineDown("It was started again since the last sync.")
    raise OtherWeightsError(
        f"vLLM sampled with weights from {others[0]}, and this run has pushed {pushed}: another "
        "run uses the same server. Give each run one of its own (rollout.url)."
    )
