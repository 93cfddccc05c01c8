"""The vLLM engine: episodes as independent coroutines, weights of its own.

vLLM runs beside the trainer (colocated), behind a server that the run starts, or behind one that
somebody else started. No episode waits for another: each turn is a request by itself, which vLLM
batches with whatever else is under way. Where vLLM dies it is started again, gets the weights once
more, and what was unfinished is asked again with the same seeds: no rollout is lost.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from reframe_vl.policy.model import VisionLanguageModel
from reframe_vl.rollout import vllm_environment, vllm_lifetime, vllm_weights
from reframe_vl.rollout.engine import EngineError, Generation
from reframe_vl.rollout.vllm_backend import (
    Backend,
    EngineDown,
    check_versions,
    default_arguments,
)
from reframe_vl.rollout.vllm_http import ServerVLLM
from reframe_vl.rollout.vllm_launch import LaunchedVLLM
from reframe_vl.rollout.vllm_local import LocalVLLM
from reframe_vl.rollout.vllm_request import Reply, check_expansion, generation, turn_request
from reframe_vl.types import Context, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for."""


class VLLMEngine:
    """Generates with vLLM.

    Args:
        model: The policy, whose checkpoint vLLM loads first.
        arguments: vLLM's engine arguments, beside those that follow from the policy.
        url: Of a server that runs already; None for none.
        launch: Run vLLM as a server of its own, not beside the trainer.
        weights_folder: Where weights are handed over: shared memory, or for a server on another
            machine a folder that both see.
        devices: The accelerators of a colocated or launched vLLM, as CUDA_VISIBLE_DEVICES names
            them; None is the trainer's own.
        max_concurrent: Requests under way at once.
        max_restarts: How often vLLM may die between two weight syncs.
        start_timeout_s: How long a server may take to start.
        precision: Of the trainer's forward; vLLM computes in the weights' own.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        *,
        arguments: Mapping[str, Any] | None = None,
        url: str | None = None,
        launch: bool = False,
        weights_folder: str = "/dev/shm",
        devices: str | None = None,
        max_concurrent: int = 256,
        max_restarts: int = 3,
        start_timeout_s: float = 600.0,
        precision: object = None,
    ) -> None:
        """Starts nothing yet.

        Raises:
            ValueError: A server cannot be both launched and at hand already; or no request is ever
                allowed.
        """
        if max_concurrent < 1:
            raise ValueError(
                f"rollout.engine.max_concurrent is {max_concurrent}: it must be at least 1."
            )
        if url and launch:
            raise ValueError(
                f"rollout.url={url} names a server that runs, rollout.launch=true starts one: set "
                "one of the two."
            )
        self.model = model
        self.max_restarts = max_restarts
        self.weights_parent = Path(weights_folder)
        self.devices = devices
        everything = {**default_arguments(), **(arguments or {}), **_arguments_of(model)}
        self.backend: Backend
        if url:
            self.backend = ServerVLLM(url, start_timeout_s, everything.get("max_model_len"))
        elif launch:
            self.backend = LaunchedVLLM(everything, start_timeout_s)
        else:
            self.backend = LocalVLLM(everything)
        self._slots = asyncio.Semaphore(max_concurrent)
        self._restarting = asyncio.Lock()
        self._under_way = 0
        self._drained = asyncio.Event()
        self._starts = 0
        self._restarts = 0
        self._failure: EngineDown | None = None
        self._given_up = ""
        self._folder: Path | None = None
        self._written: Path | None = None
        self._served: Path | None = None

    # ------------------------------------------------------------------ Engine protocol

    def open(self, sessions: Sequence[str]) -> None:
        """Nothing to announce: no session waits for another."""

    async def generate(
        self, session: str, context: Context, sampling: Sampling, seed: int
    ) -> Generation:
        """Samples the next turn after ``context``; vLLM's prefix cache holds what came before.

        Raises:
            EngineError: vLLM refused the turn, or died too often.
            ExpansionError: vLLM reads other tokens than the trainer.
            OtherWeightsError: Somebody else has put weights into vLLM.
        """
        request = turn_request(context, sampling, seed)

        async def ask() -> Reply:
            answer = await self.backend.generate(request)
            check_versions(self.served, answer.versions)
            return answer

        async with self._slots:
            reply = await self._persistently(ask)
        check_expansion(self.model.expand(context).token_ids, reply.prompt_ids, request.views)
        try:
            return generation(reply)
        except ValueError as error:
            raise EngineError(str(error)) from error

    def release(self, session: str) -> None:
        """Nothing to free: a request's memory is vLLM's to reuse."""

    def close(self) -> None:
        """Ends vLLM, unless somebody else started it, and removes the weights."""
        self.backend.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._written = self._served = None

    # ------------------------------------------------------------------ weights

    @property
    def shared(self) -> bool:
        """A server that was started by somebody else is every rank's."""
        return type(self.backend) is ServerVLLM

    async def start(self, device: torch.device) -> None:
        """Starts vLLM.

        Raises:
            EngineError: It cannot be started; the message names the remedy.
        """
        if isinstance(self.backend, LocalVLLM | LaunchedVLLM):
            self.backend.environment = vllm_environment.visible(device, self.devices)
        self._folder = vllm_weights.new_folder(self.weights_parent)
        vllm_lifetime.own(self._folder)
        await self.backend.start()

    async def sync(self, model: VisionLanguageModel, version: int) -> None:
        """Pushes the weights: the adapter alone where one is trained, else all of them.

        Raises:
            EngineError: vLLM cannot take them, or there is no room to hand them over.
        """
        if self._folder is None:
            raise EngineError("The engine was not started: call start() before sync().")
        # The old ones first: both together might not fit.
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._written = self._served = None
        folder = self._folder / f"version_{version}"
        adapter = vllm_weights.has_adapter(model)
        write = vllm_weights.write_adapter if adapter else vllm_weights.write_weights
        try:
            await asyncio.to_thread(write, model, folder)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._folder).free / 2**30
            raise EngineError(
                f"The weights cannot be written to {folder} ({error}); {free:.2f} GiB are free "
                "there. Make room for one copy of them for each rank (Docker gives /dev/shm 64 MB: "
                "--shm-size), or set rollout.engine.weights_folder to a folder that has it."
            ) from error
        self._written = folder
        self._served = vllm_weights.adapter_folder(folder) if adapter else folder
        self._restarts, self._given_up = 0, ""
        await self._persistently(self._push)

    @property
    def served(self) -> str:
        """The folder of the weights that vLLM has to have; empty before any were pushed."""
        return str(self._served or "")

    async def follow(self, served: str) -> None:
        """Takes note of weights that another rank has pushed to the server of both.

        Args:
            served: Their folder, from which this rank pushes too where the server has died.
        """
        self._served = Path(served)
        self._restarts, self._given_up = 0, ""
        if isinstance(self.backend, ServerVLLM):
            self.backend.has_adapter = vllm_weights.has_adapter(self.model)

    async def rest(self) -> None:
        """Frees the accelerator's memory, where the engine was made to (``enable_sleep_mode``)."""
        # The next sync starts one that is down.
        with suppress(EngineDown):
            await self.backend.rest()

    async def _push(self) -> None:
        if self._served is None:
            return
        if vllm_weights.has_adapter(self.model):
            await self.backend.load_adapter(self._served)
        else:
            await self.backend.load_weights(self._served)

    async def _restore(self) -> None:
        """Pushes the weights once more, where vLLM does not have them still or again."""
        if self._served is None or await self.backend.serves(self._served):
            return
        # One that somebody else has started may be answering, and dies if images are forgotten
        # whose tokens it is about to read.
        while self._under_way:
            self._drained.clear()
            await self._drained.wait()
        await self._push()

    # ------------------------------------------------------------------ failures

    async def _persistently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks until vLLM has answered, and starts it again where it is down."""
        while True:
            # Whoever comes while it is started again waits until it has its weights back.
            async with self._restarting:
                while self._failure is not None:
                    await self._restart(self._failure)
                starts = self._starts
                self._under_way += 1
            try:
                return await ask()
            except EngineDown as failure:
                if starts == self._starts:
                    self._failure = failure
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._drained.set()

    async def _restart(self, failure: EngineDown) -> None:
        """Starts vLLM again, once for all who found it down."""
        if self._folder is None:
            raise EngineError("The engine was closed.") from failure
        if self._given_up:
            raise EngineError(self._given_up) from failure
        self._restarts += 1
        if self._restarts > self.max_restarts:
            raise EngineError(
                f"vLLM died {self._restarts} times with the same weights; the last time: "
                f"{failure} Look at its log (VLLM_LOGGING_LEVEL=INFO) and at the memory that "
                "is left; rollout.engine.max_restarts allows more."
            ) from failure
        logger.warning(
            "vLLM is down (%s): starting it again (%d of %d); unfinished turns are redone.",
            failure,
            self._restarts,
            self.max_restarts,
        )
        try:
            await self.backend.start()
            await self._restore()
        except EngineDown as again:
            logger.warning("vLLM went down at once: %s", again)
            self._failure = again
            return
        except EngineError as error:
            # Each of those who wait would wait as long for the same.
            self._given_up = str(error)
            logger.error("vLLM is given up until the next sync: %s", error)
            raise
        self._failure = None
        self._starts += 1


def _arguments_of(model: VisionLanguageModel) -> dict[str, Any]:
    """The engine arguments that follow from the policy."""
    base: Any = model.base
    arguments: dict[str, Any] = {
        "model": str(Path(base.name_or_path).expanduser()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if vllm_weights.has_adapter(model):
        peft: Any = model.model
        rank = int(peft.peft_config[peft.active_adapter].r)
        fitting = [allowed for allowed in _LORA_RANKS if allowed >= rank]
        if not fitting:
            raise ValueError(f"vLLM serves LoRA ranks up to {_LORA_RANKS[-1]}, not {rank}.")
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting[0]}
    return arguments
