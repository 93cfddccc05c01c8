"""Writes checkpoints in the background, each of which appears whole or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from reframe_vl.checkpoint.reading import PROGRESS

logger = logging.getLogger(__name__)

_PART = ".part"
_ASIDE = ".aside_"
_IN_USE = "in_use"
"""In a folder aside: a file that is locked while its process lives."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place to write a file or folder, which takes its name once it is complete and on disk.

    Whatever ends the process before that leaves what had the name before. A link is followed, so
    that it stays.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    remove(part)
    try:
        yield part
        put_in_place(part, path)
    finally:
        remove(part)


def part_of(path: Path) -> Path:
    """Where a file or folder is while it is written: beside its place, on the same file system."""
    return path.with_name(f".{path.name}{_PART}")


def put_in_place(part: Path, path: Path) -> None:
    """Forces what was written to disk, and gives it its name."""
    for file in (part, *part.rglob("*")):
        _force(file)
    old = path.with_name(f".{path.name}.old")
    remove(old)
    # A folder cannot take the place of another one: for a moment neither has the name.
    if path.is_dir():
        os.rename(path, old)
    os.replace(part, path)
    _force(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder; a folder first loses its name, since that takes time."""
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f".{path.name.lstrip('.')}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed had not finished."""
    for ending in (_PART, ".gone"):
        for path in folder.glob(f".*{ending}"):
            remove(path)
    for old in folder.glob(".*.old"):
        place = old.with_name(old.name[1:].removesuffix(".old"))
        # Killed between the two names: the older one is the whole one.
        if place.exists():
            remove(old)
        else:
            os.rename(old, place)


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """A new folder inside another one, for what is needed for a while; it goes at the end.

    What processes that were killed left goes before: their locks ended with them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for in_use in folder.glob(f"{_ASIDE}*/{_IN_USE}"):
        try:
            with in_use.open("r+") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(in_use.parent, ignore_errors=True)
        except OSError:
            # Its process lives, it went just now, it is someone else's, or there are no locks.
            continue
    with tempfile.TemporaryDirectory(dir=folder, prefix=_ASIDE) as made:
        place = Path(made)
        with (place / f"{_IN_USE}{_PART}").open("w") as handle:
            # A file system without locks is not tidied up.
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
                # Found by others only once it is locked.
                os.rename(handle.name, place / _IN_USE)
            yield place


def snapshot(state: Any) -> Any:
    """A copy in the CPU's memory that training does not change; what is shared stays shared."""
    return _copied(state, {})


class CheckpointWriter:
    """Writes one checkpoint at a time while training goes on.

    Attributes:
        background: Off, ``begin`` returns when all is written.
    """

    def __init__(self, background: bool = True) -> None:
        """Starts no thread before it is needed."""
        self.background = background
        self._thread: ThreadPoolExecutor | None = None
        self._job: tuple[Path, Future[None]] | None = None

    def begin(self, path: Path, write: Callable[[], None]) -> None:
        """Begins to write, after what was begun before is done.

        Args:
            path: What will be written; for messages.
            write: Writes it, in a thread of its own.

        Raises:
            OSError: The one before could not be written.
        """
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._job = path, self._thread.submit(write)
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Waits until everything that was begun is on disk.

        Raises:
            OSError: It could not be written; what was there before is untouched.
        """
        if self._job is None:
            return
        (path, job), self._job = self._job, None
        try:
            job.result()
        except (OSError, RuntimeError) as failure:
            # torch reports a full disk as a RuntimeError of its archive writer.
            raise OSError(
                f"{path} could not be written ({failure}). Checkpoints from before are whole: make "
                f"room on the disk of {path.parent}, and go on with resume."
            ) from failure

    def close(self) -> None:
        """Finishes what was begun, and ends the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None


def save_file(state: Mapping[str, Any], path: Path) -> None:
    """Writes a state as one file."""
    with written_whole(path) as part:
        torch.save(dict(state), part)


def save_parts(
    tensors: dict[str, Any],
    progress: dict[str, Any],
    path: Path,
    group: dist.ProcessGroup | None,
    first: bool,
) -> None:
    """Writes this rank's part of a state into a folder that ``make_room`` has made.

    Args:
        tensors: What is spread over the ranks.
        progress: All else, which every rank has.
        path: Of the folder, once it is complete.
        group: The ranks, for this alone: training may communicate at the same time.
        first: Whether this is the rank that writes what all have.

    Raises:
        OSError: A rank could not write its part.
    """
    part = part_of(path)
    if first:
        torch.save(progress, part / PROGRESS)
    # The last file that is written says where everything is, after all ranks are done.
    writer = dcp.FileSystemWriter(part, sync_files=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as failure:
        # No ordinary exception: what waits for others would not catch it.
        causes = {str(cause) for cause, _ in failure.failures.values()}
        raise OSError("; ".join(sorted(causes))) from failure
    if first:
        put_in_place(part, path)


def make_room(path: Path) -> None:
    """Makes the folder that ranks write their parts into."""
    remove(part_of(path))
    part_of(path).mkdir(parents=True)


def _copied(state: Any, known: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(state, DTensor):
        return state.detach().clone()
    if isinstance(state, Tensor):
        key = (state.data_ptr(), state.shape, state.stride(), state.dtype, state.device)
        if key not in known or not state.numel():
            known[key] = state.detach().to("cpu", copy=True)
        return known[key]
    if isinstance(state, dict):
        return type(state)((name, _copied(value, known)) for name, value in state.items())
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(_copied(value, known) for value in state)
    return state


def _force(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
