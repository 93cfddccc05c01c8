"""Where vLLM runs: the few things that an engine asks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

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


class EngineDown(EngineError):
    """vLLM died or cannot be reached; a new start may help."""


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

    async def rest(self) -> None:
        """Frees the accelerator's memory until the next weights come, where that is safe."""

    def stop(self) -> None:
        """Ends it, whatever state it is in."""
