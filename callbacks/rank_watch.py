"""Ends a run on several ranks when one of them is gone, and says which.

Without it the others wait in a communication, for half an hour by default, and then report that.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

EXIT_STATUS = 70


@dataclass
class _Peer:
    """What is known of another rank.

    Attributes:
        host: The machine it runs on.
        process: Its process there.
        beats: How often it has been heard of.
        heard: When that number last grew.
    """

    host: str
    process: int
    beats: int = -1
    heard: float = field(default_factory=time.monotonic)

    def name(self, rank: int) -> str:
        return f"Rank {rank} (process {self.process} on {self.host})"


class RankWatch(Callback):
    """Each rank lets the others know that it lives, and ends where one no longer does.

    Args:
        silence_s: A rank on another machine is given up after so long without a sign of life; one
            on the same machine at once when its process is gone.
        every_s: Between two signs of life.
    """

    def __init__(self, silence_s: float = 40.0, every_s: float = 2.0) -> None:
        """Nothing runs before there are several ranks.

        Raises:
            ValueError: A rank would be given up between two signs of life.
        """
        if not 0 < 2 * every_s <= silence_s:
            raise ValueError(
                f"callbacks.rank_watch: silence_s={silence_s} must be at least twice "
                f"every_s={every_s}."
            )
        self.silence_s, self.every_s = silence_s, every_s
        self._peers: dict[int, _Peer] = {}
        self._store: TCPStore | None = None
        self._rank, self._looked = 0, time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Meets the other ranks."""
        if stage != "fit" or trainer.world_size == 1:
            return
        host, self._rank = socket.gethostname(), trainer.global_rank
        address = os.environ.get("MASTER_ADDR", "localhost")
        # A store of its own: the process group's may be busy for as long as a rank is waited for.
        wait = timedelta(seconds=self.silence_s)
        if trainer.is_global_zero:
            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=wait)
        port = trainer.strategy.broadcast(self._store.port if self._store else 0)
        if self._store is None:
            self._store = TCPStore(address, port, is_master=False, timeout=wait)
        self._store.set(f"where/{self._rank}", f"{host}/{os.getpid()}")
        for rank in range(trainer.world_size):
            if rank != self._rank:
                other, process = self._store.get(f"where/{rank}").decode().rsplit("/", 1)
                self._peers[rank] = _Peer(other, int(process))
        self._over.clear()
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on ranks may end, one before the other."""
        trainer.strategy.barrier("training done")
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Says what is behind a communication that failed: a rank that is gone."""
        if gone := self._gone():
            logger.error("%s", self._sentence(gone))
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the watch."""
        self._stop()

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self.every_s)
        self._thread, self._peers = None, {}

    def _watch(self) -> None:
        suspects: set[str] = set()
        while not self._over.wait(self.every_s):
            found = {*self._gone(), *self._silent()}
            # Twice in a row: ranks that end together do not end in the same moment.
            if suspects & found and not self._over.is_set():
                logger.critical("%s", self._sentence(sorted(suspects & found)))
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                # The main thread may wait in a communication that nothing interrupts.
                os._exit(EXIT_STATUS)
            suspects = found

    def _gone(self) -> list[str]:
        """Ranks of this machine whose process is not there."""
        here = socket.gethostname()
        return [
            peer.name(rank)
            for rank, peer in self._peers.items()
            if peer.host == here and not _alive(peer.process)
        ]

    def _silent(self) -> list[str]:
        """Ranks that have not been heard of for too long."""
        if self._store is None:
            return []
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > self.silence_s / 2:
            # This process was stopped for a while, and others may have been too.
            for peer in self._peers.values():
                peer.heard = now
        try:
            self._store.add(f"beat/{self._rank}", 1)
            for rank, peer in self._peers.items():
                beats = self._store.add(f"beat/{rank}", 0)
                if beats != peer.beats:
                    peer.beats, peer.heard = beats, now
        except RuntimeError as failure:
            # The store lives with rank 0.
            logger.debug("The ranks' store does not answer: %s", failure)
        return [
            peer.name(rank)
            for rank, peer in self._peers.items()
            if now - peer.heard > self.silence_s
        ]

    def _sentence(self, gone: list[str]) -> str:
        return (
            f"{' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone: it ended, was killed "
            "or lost its machine (see its own output). The run cannot go on without it, so rank "
            f"{self._rank} ends too; go on from the last checkpoint with resume."
        )


def _alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
