"""A vLLM behind its HTTP server, which was started by ``reframe_vl.rollout.vllm_server``."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import socket
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image

from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_backend import EngineDown
from reframe_vl.rollout.vllm_request import Reply, Request
from reframe_vl.types import View

logger = logging.getLogger(__name__)
# It tells of each request.
logging.getLogger("httpx2").setLevel(logging.WARNING)

_ADAPTER = "policy"
_KEPT_IMAGES = 1024
_WATCHED = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 8),
]
"""A turn may take long, so nothing else tells that a server's machine has gone."""

_START = "Start one: python -m reframe_vl.rollout.vllm_server MODEL --port PORT (docs/vllm.md)"


class ServerVLLM:
    """Asks a server.

    Args:
        url: Up to the port.
        start_timeout_s: How long it may take until it answers, first or again.
        min_length: Tokens that a context may have at least.

    Attributes:
        has_adapter: Whether the adapter, and not the base, is to answer.
    """

    def __init__(
        self, url: str, start_timeout_s: float = 600.0, min_length: int | None = None
    ) -> None:
        """Connects to nothing yet.

        Raises:
            ValueError: The URL has no scheme.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"A vLLM server's address is written http://HOST:PORT, not {url!r}.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.start_timeout_s = start_timeout_s
        self.min_length = min_length
        self._client: httpx2.AsyncClient | None = None
        self._images: OrderedDict[str, str] = OrderedDict()
        self.has_adapter = False

    # ------------------------------------------------------------------ Backend protocol

    async def start(self) -> None:
        """Waits until the server answers, and checks that it can take weights."""
        if self._client is None:
            # A turn may take long; what is not there is known soon.
            self._client = httpx2.AsyncClient(
                base_url=self.url,
                timeout=httpx2.Timeout(None, connect=10.0),
                transport=httpx2.AsyncHTTPTransport(
                    # Well before vLLM closes what is idle (after 5 s): a request that it crosses
                    # would look like a dead server.
                    limits=httpx2.Limits(
                        max_connections=None, max_keepalive_connections=64, keepalive_expiry=1.0
                    ),
                    socket_options=_WATCHED,
                ),
                # A proxy of the environment is for the world outside.
                trust_env=False,
            )
        deadline = time.monotonic() + self.start_timeout_s
        told = False
        while not await self.is_up():
            self.check_alive()
            if time.monotonic() > deadline:
                raise EngineError(self.unanswered())
            if not told:
                logger.info("Waiting for vLLM at %s, up to %.0f s", self.url, self.start_timeout_s)
                told = True
            await asyncio.sleep(0.2)
        # Another server may have the port that this one could not get.
        self.check_alive()
        response = await self._client.get("/is_paused")
        if response.status_code != 200:
            raise EngineError(f"The server at {self.url} does not take weights. {_START}.")
        if self.min_length is not None:
            await self._check_length(self._client, self.min_length)

    async def generate(self, request: Request) -> Reply:
        """Answers a request."""
        body: dict[str, Any] = {
            "token_ids": request.token_ids,
            "sampling_params": dict(request.parameters),
            "return_token_ids": True,
        }
        if request.views:
            body["content_parts"] = [
                {"type": "image_url", "url": self._image(view), "uuid": view.hash}
                for view in request.views
            ]
        if self.has_adapter:
            body["model"] = _ADAPTER
        return _reply(await self._post("/inference/v1/generate", body))

    async def load_weights(self, folder: Path) -> None:
        """Loads all weights; the server reads the folder itself."""
        await self.call("take_weights", str(folder))
        await self._forget()
        await self._post("/update_weight_version", {"new_version": str(folder)})

    async def load_adapter(self, folder: Path) -> None:
        """Loads an adapter in place of the one before."""
        await self._post(
            "/v1/load_lora_adapter",
            {"lora_name": _ADAPTER, "lora_path": str(folder), "load_inplace": True},
        )
        if not all(int(count) for count in await self.call("count_adapted_modules")):
            raise EngineError(
                f"The server at {self.url} applies the adapter in {folder} to no module: start it "
                "with the model that the adapter was trained on."
            )
        self.has_adapter = True
        await self._forget()
        await self._post("/update_weight_version", {"new_version": str(folder)})

    async def serves(self, folder: Path) -> bool:
        """Whether the server has the weights from a folder; another rank may have pushed them."""
        try:
            response = await self._connected().get("/weight_info")
        except httpx2.TransportError as error:
            raise EngineDown(f"The server at {self.url} is gone ({error!r}).") from error
        found: dict[str, Any] = response.json() if response.status_code == 200 else {}
        return found.get("weight_version") == str(folder)

    async def rest(self) -> None:
        """A server has its accelerator to itself."""

    def stop(self) -> None:
        """Leaves a server that somebody else started running."""
        self._client = None

    # ------------------------------------------------------------------ the server

    def check_alive(self) -> None:
        """Raises EngineError where it is known that the server will not come up."""

    def unanswered(self) -> str:
        """What to do about a server that has not answered in time."""
        return (
            f"No vLLM server answers at {self.url} after {self.start_timeout_s:.0f} s. {_START}; "
            "or let the run start it: rollout.launch=true."
        )

    async def _check_length(self, client: httpx2.AsyncClient, needed: int) -> None:
        """Long rollouts alone would fail, and the policy would learn from short ones only."""
        served = (await client.get("/v1/models")).json()["data"][0]
        if (length := served.get("max_model_len")) is not None and length < needed:
            raise EngineError(
                f"The server at {self.url} serves contexts of up to {length} tokens, and rollouts "
                f"may have {needed} (limits.max_context_tokens; a teacher needs one more): start "
                f"it with --max-model-len {needed}."
            )

    async def is_up(self, otherwise: bool = False) -> bool:
        """Whether the server and its engine answer.

        Args:
            otherwise: What to think of one that has not answered in time.
        """
        for _ in range(2):
            try:
                response = await self._connected().get("/health", timeout=10.0)
            except httpx2.TimeoutException:
                return otherwise
            except httpx2.TransportError:
                # After an error of its own a server closes the connection: try another one.
                continue
            return response.status_code == 200
        return False

    async def call(self, method: str, *arguments: str) -> list[Any]:
        """Calls a method of the server's workers, by name."""
        body = {"method": method, "args": list(arguments)}
        answer = await self._post("/collective_rpc", body)
        results: list[Any] = answer.get("results", [])
        return results

    async def tokenize(self, text: str) -> list[int]:
        """The ids that the server's tokenizer makes of a text."""
        answer = await self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        ids: list[int] = answer["tokens"]
        return ids

    async def close(self) -> None:
        """Ends the connections."""
        if self._client is not None:
            await self._client.aclose()
        self.stop()

    async def _forget(self) -> None:
        """Drops keys, values and image features of the old weights."""
        for cache in ("prefix", "mm", "encoder"):
            await self._post(f"/reset_{cache}_cache", {})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._connected().post(path, json=body)
        except httpx2.TransportError as error:
            raise EngineDown(f"The server at {self.url} is gone ({error!r}).") from error
        if response.status_code == 200:
            is_json = response.headers.get("content-type", "").startswith("application/json")
            answer: dict[str, Any] = response.json() if is_json else {}
            return answer
        # One that was started again knows nothing of it.
        if response.status_code == 404 and body.get("model") == _ADAPTER:
            raise EngineDown(f"The server at {self.url} has lost the adapter.")
        # A busy server may take its time.
        if response.status_code >= 500 and not await self.is_up(otherwise=True):
            raise EngineDown(f"The server at {self.url} answers {response.status_code}.")
        raise EngineError(
            f"The server at {self.url} refused {path} ({response.status_code}: "
            f"{response.text[:500]}). It must be of the model that is trained and started with "
            "reframe_vl.rollout.vllm_server, for an adapter with --enable-lora --max-lora-rank "
            "RANK, and see the folder rollout.engine.weights_folder."
        )

    def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            raise EngineDown(f"Not connected to {self.url}.")
        return self._client

    def _image(self, view: View) -> str:
        """A view as a data URL; lossless, and made once for all turns that show it."""
        if view.hash not in self._images and view.pixels is not None:
            file = io.BytesIO()
            Image.fromarray(view.pixels).save(file, "PNG", compress_level=1)
            data = base64.b64encode(file.getvalue()).decode("ascii")
            self._images[view.hash] = f"data:image/png;base64,{data}"
            if len(self._images) > _KEPT_IMAGES:
                self._images.popitem(last=False)
        return self._images[view.hash]


def _reply(answer: dict[str, Any]) -> Reply:
    sampled = answer["choices"][0]
    content = (sampled["logprobs"] or {}).get("content") or []
    tables = answer["prompt_logprobs"] or []
    return Reply(
        answer["prompt_token_ids"],
        sampled["token_ids"],
        [entry["logprob"] for entry in content],
        sampled["finish_reason"],
        [
            table[str(token)]["logprob"] if table else None
            for token, table in zip(answer["prompt_token_ids"], tables, strict=False)
        ],
        [span["version"] for span in sampled.get("weight_versions") or ()],
    )
