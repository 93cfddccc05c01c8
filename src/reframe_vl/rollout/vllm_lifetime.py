"""No process of an engine outlives the one that started it, not even where that is killed.

vLLM ends its processes where the trainer ends in an orderly way; after a SIGKILL it does not.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path

_OWNER = "REFRAME_ENGINE_OWNER"
_WEIGHTS = "REFRAME_WEIGHTS_FOLDER"


def own(weights: Path | None = None) -> None:
    """Makes the engines that this process starts end with it.

    Args:
        weights: A folder that they then remove.
    """
    os.environ[_OWNER] = str(os.getpid())
    os.environ[_WEIGHTS] = str(weights or "")


def end_with_owner() -> None:
    """Starts a thread that ends this process of an engine once its owner has died."""
    if owner := os.environ.get(_OWNER):
        weights = os.environ.get(_WEIGHTS, "")
        threading.Thread(target=_end_after, args=[int(owner), weights], daemon=True).start()


def _end_after(owner: int, weights: str) -> None:
    parent = os.getppid()
    # One that cannot be found has died already.
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])
    if weights:
        # They may fill a large part of the memory.
        shutil.rmtree(weights, ignore_errors=True)
    # Between owner and worker there may be a process of the engine, which then belongs to nobody.
    if multiprocessing.parent_process() is not None and parent not in (1, owner):
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
