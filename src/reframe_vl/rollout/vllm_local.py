"""vLLM beside the trainer (colocated): an ``AsyncLLM`` whose engine is a child process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_backend import FIXED_ARGUMENTS, EngineDown
from reframe_vl.rollout.vllm_environment import REMEDY, prepare, variables
from reframe_vl.rollout.vllm_request import Reply, Request

_GRACE_S = 10.0
_ADAPTER = "policy", 1
"""Name and number of the one adapter: each sync puts another in its place."""


class LocalVLLM:
    """Runs vLLM with these engine arguments (``vllm.AsyncEngineArgs``)."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Starts nothing yet."""
        self.arguments = {**arguments, **FIXED_ARGUMENTS}
        self.environment: Mapping[str, str] = {}
        self._llm: Any = None
        self._adapter: Any = None
        self._requests = 0
        self._asleep = False

    async def start(self) -> None:
        """Starts vLLM."""
        self.stop()
        prepare()
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(f"vLLM cannot be loaded ({error}). {REMEDY}") from error
        try:
            with variables(self.environment):
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.arguments))
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise EngineError(
                f"vLLM did not start with {self.arguments} ({error}). For a lack of memory lower "
                "vllm.gpu_memory_utilization, vllm.max_model_len or vllm.max_num_seqs; an argument "
                "that vLLM does not know is named above; with VLLM_LOGGING_LEVEL=INFO its own "
                "process says more."
            ) from error

    async def generate(self, request: Request) -> Reply:
        """Answers a request."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineGenerateError

        llm = self._running()
        if self._asleep:
            raise EngineError("vLLM sleeps: weights are pushed before rollouts are generated.")
        self._requests += 1
        parameters = SamplingParams(**request.parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        output = None
        try:
            with _deaths():
                [prompt] = await llm.renderer.render_cmpl_async([_prompt(request)])
                async for latest in llm.generate(
                    prompt, parameters, str(self._requests), lora_request=self._adapter
                ):
                    output = latest
        except (VLLMClientError, EngineGenerateError) as error:
            raise EngineError(f"vLLM refused a request: {error}") from error
        if output is None:
            raise EngineDown("vLLM ended a request without an answer.")
        return _reply(output)

    async def load_weights(self, folder: Path) -> None:
        """Loads all weights."""
        llm = self._running()
        with _deaths():
            await self._wake(llm)
            await llm.collective_rpc("take_weights", args=(str(folder),))
            await _forget(llm)
            await llm.update_weight_version(str(folder))

    async def load_adapter(self, folder: Path) -> None:
        """Loads an adapter in place of the one before."""
        from vllm.lora.request import LoRARequest

        llm = self._running()
        with _deaths():
            await self._wake(llm)
            await llm.add_lora(LoRARequest(*_ADAPTER, str(folder), load_inplace=True))
            counts = await llm.collective_rpc("count_adapted_modules")
            await _forget(llm)
            await llm.update_weight_version(str(folder))
        if not all(counts):
            raise EngineError(
                f"vLLM applies the adapter in {folder} to no module: its names or target_modules "
                "are not those of vLLM's model. Train the weights (model.lora=null), or adapt "
                "other modules."
            )
        self._adapter = LoRARequest(*_ADAPTER, str(folder))

    async def serves(self, folder: Path) -> bool:
        """Whether it has the weights from a folder."""
        with _deaths():
            version: str = await self._running().get_weight_version()
        return version == str(folder)

    async def rest(self) -> None:
        """Puts vLLM to sleep where that was asked for, its weights in the CPU's memory.

        Never deeper: weights that are thrown away come back without what is no parameter.
        """
        if self.arguments.get("enable_sleep_mode") and not self._asleep:
            with _deaths():
                await self._running().sleep(level=1)
            self._asleep = True

    def stop(self) -> None:
        """Ends vLLM and its process."""
        if self._llm is not None:
            self._llm.shutdown(timeout=_GRACE_S)
        self._llm = self._adapter = None
        self._asleep = False

    async def _wake(self, llm: Any) -> None:
        if self._asleep:
            await llm.wake_up()
            self._asleep = False

    def _running(self) -> Any:
        if self._llm is None:
            raise EngineDown("vLLM is not running.")
        return self._llm


@contextmanager
def _deaths() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDown("vLLM's process died.") from error


async def _forget(llm: Any) -> None:
    """Drops keys, values and image features of the old weights."""
    await llm.reset_prefix_cache()
    await llm.reset_mm_cache()
    await llm.reset_encoder_cache()


def _prompt(request: Request) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
    if request.views:
        images = [Image.fromarray(view.pixels) for view in request.views if view.pixels is not None]
        prompt["multi_modal_data"] = {"image": images}
        prompt["multi_modal_uuids"] = {"image": [view.hash for view in request.views]}
    return prompt


def _reply(output: Any) -> Reply:
    sampled = output.outputs[0]
    logprobs = sampled.logprobs or [{}] * len(sampled.token_ids)
    prompt = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    return Reply(
        output.prompt_token_ids,
        sampled.token_ids,
        [_of(table, token) for table, token in zip(logprobs, sampled.token_ids, strict=True)],
        sampled.finish_reason,
        [_of(table, token) for token, table in prompt],
        [span.version for span in sampled.weight_versions or ()],
    )


def _of(table: Any, token: int) -> float | None:
    entry = table.get(token) if table else None
    return None if entry is None else float(entry.logprob)
