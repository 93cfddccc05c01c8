"""A vLLM server that the trainer starts, watches and ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from reframe_vl.rollout.engine import EngineError
from reframe_vl.rollout.vllm_environment import defaults
from reframe_vl.rollout.vllm_http import ServerVLLM
from reframe_vl.rollout.vllm_server import command_line

logger = logging.getLogger(__name__)

_SHOWN_LINES = 15
_GRACE_S = 10.0


class LaunchedVLLM(ServerVLLM):
    """Starts a server with these engine arguments on a free port of this machine."""

    def __init__(self, arguments: Mapping[str, Any], start_timeout_s: float = 600.0) -> None:
        """Starts nothing yet."""
        self.port = _free_port()
        super().__init__(_url(self.port), start_timeout_s)
        self.arguments = dict(arguments)
        self.environment: Mapping[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    async def start(self) -> None:
        """Starts the server, in the place of one that has died."""
        if self.process is not None and self.process.poll() is not None:
            status = self.process.returncode
            logger.warning("The server ended with %s. It said:\n%s", status, self._last_words())
        self.stop()
        if not _is_free(self.port):
            self.port = _free_port()
            self.url = _url(self.port)
        rest = dict(self.arguments)
        model = str(rest.pop("model"))
        command = [sys.executable, "-m", "reframe_vl.rollout.vllm_server", model]
        command += ["--port", str(self.port), *command_line(rest)]
        # Removed with the server: a failure shows what it says.
        self._log = tempfile.NamedTemporaryFile(prefix="reframe-vllm-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | defaults() | dict(self.environment),
            # Ctrl-C is the trainer's to answer, and all that the server starts ends with it.
            start_new_session=True,
        )
        try:
            await super().start()
        except BaseException:
            self.stop()
            raise

    def check_alive(self) -> None:
        """Raises EngineError, with its last words, where the server has ended."""
        if self.process is None or self.process.poll() is None:
            return
        raise EngineError(
            f"The vLLM server ended with status {self.process.returncode} before it was ready. For "
            "a lack of memory lower vllm.gpu_memory_utilization, vllm.max_model_len or "
            f"vllm.max_num_seqs. Its last lines:\n{self._last_words()}"
        )

    def unanswered(self) -> str:
        """What the server was doing all the time."""
        return (
            f"The vLLM server was not ready after {self.start_timeout_s:.0f} s: "
            "rollout.engine.start_timeout_s allows more (with VLLM_LOGGING_LEVEL=INFO it says what "
            f"it does). Its last lines:\n{self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])

    def stop(self) -> None:
        """Ends the server and everything that it has started."""
        super().stop()
        if self.process is None:
            return
        process, self.process = self.process, None
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._log.close()


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: connections that were broken off a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
