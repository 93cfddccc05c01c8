"""A process for code that nobody has read: how it is walled off, bounded and ended.

By default bubblewrap walls it off: namespaces of its own (no network, no other processes), an empty
file system but for the Python installation and the system's libraries, which are read-only, and a
small ``/tmp``; an empty environment, no privileges, and a filter of system calls
(``sandbox_filter``) that leaves it one thread. The kernel bounds its memory, processor time, files
and file sizes; the number of its files is counted from here. Its namespace dies as a whole,
whatever its code does.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Literal, TypeAlias

from reframe_vl.tools.base import ToolUnavailableError
from reframe_vl.tools.sandbox_filter import filter_program

logger = logging.getLogger(__name__)

Wall: TypeAlias = Literal["bubblewrap", "unsafe"]
"""``unsafe`` is a plain process with the kernel's limits, which can read and write the user's files
and use the network: for trying things out with code that is trusted."""

_WORKER = Path(__file__).with_name("sandbox_worker.py")
_PACKAGES = ("numpy", "PIL", "matplotlib")
_DEVICES = ("null", "zero", "random", "urandom")
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_KILL_S = 10.0
_MAX_STDERR_CHARS = 1_500


class SandboxError(ToolUnavailableError):
    """No interpreter can be started; the message says why, and the remedy."""


@dataclass(frozen=True)
class Limits:
    """What an interpreter may use.

    Attributes:
        call_s: Wall time of a call, less what fetching frames takes.
        cpu_s: Processor time of an interpreter, over all its calls.
        memory_mb: Address space.
        disk_mb: All of ``/tmp``, and the largest file.
        max_files: In ``/tmp``.
        max_output_chars: Longer output of a call loses its middle.
        max_images: That a call returns.
        max_frames: Of the video that a call may fetch.
        image_pixels: An image is given to the code with at most so many pixels.
        frame_pixels: A frame likewise.
    """

    call_s: float = 20.0
    cpu_s: int = 120
    memory_mb: int = 2048
    disk_mb: int = 64
    max_files: int = 4096
    max_output_chars: int = 4000
    max_images: int = 4
    max_frames: int = 64
    image_pixels: int = 4096 * 4096
    frame_pixels: int = 1024 * 1024

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value <= 0:
                raise ValueError(
                    f"The sandbox's limit {entry.name} is {value}: it must be more than 0."
                )

    @property
    def of_process(self) -> dict[str, int]:
        """The kernel's limits on the process."""
        return {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_FSIZE": self.disk_mb << 20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 64,
        }


def check_wall(wall: Wall) -> None:
    """Says before anything is started whether it can be walled off so.

    Raises:
        SandboxError: It cannot, or must not.
    """
    if wall == "bubblewrap":
        _bubblewrap()
        try:
            filter_program()
        except ValueError as error:
            raise SandboxError(str(error)) from error
        return
    if wall != "unsafe":
        raise SandboxError(f"There is no sandbox {wall!r}: set it to bubblewrap or unsafe.")
    if "SLURM_JOB_ID" in os.environ:
        raise SandboxError(
            "The Python tool's sandbox is set to unsafe, which is refused in a Slurm job: the code "
            "could reach everything that the job can. Install bubblewrap and set it to bubblewrap."
        )
    logger.warning(
        "UNSAFE: code that the model writes runs WITHOUT a sandbox, with this user's files and "
        "network. Install bubblewrap and set the Python tool's sandbox to bubblewrap."
    )


class SandboxProcess:
    """The worker's process.

    It ends with the *thread* that starts it, so that nothing is left when this process is killed.

    Attributes:
        requests: The descriptor to write requests to; writing never blocks.
        replies: The descriptor to read replies from.
    """

    def __init__(self, limits: Limits, wall: Wall) -> None:
        """Starts the process and does not wait for it.

        Raises:
            SandboxError: It cannot be started.
        """
        self._limits = limits
        self._kill_lock = threading.Lock()
        self._first: int | None = None
        self._first_pid = 0
        self._folder: str | None = None
        with contextlib.ExitStack() as undo:
            try:
                self._stderr: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
                if wall == "unsafe":
                    self._folder = tempfile.mkdtemp(prefix="python-tool-")
                    undo.callback(self._remove_folder)
                self._process = self._start_walled() if wall != "unsafe" else self._start_plain()
            except OSError as error:
                remedy = ". Raise `ulimit -n`." if error.errno == errno.EMFILE else ""
                raise SandboxError(f"The sandbox cannot be started: {error}{remedy}") from error
            undo.pop_all()
        assert self._process.stdin is not None and self._process.stdout is not None
        self.requests, self.replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.requests, False)

    @property
    def ended(self) -> bool:
        """Whether the process is no more."""
        return self._process.poll() is not None

    @property
    def num_files(self) -> int:
        """Files, folders and links in its ``/tmp``."""
        if self._first is None:
            return 0
        try:
            disk = os.statvfs(f"/proc/{self._first_pid}/root/tmp")
        except OSError:  # It has just ended, which its pipe tells.
            return 0
        return disk.f_files - disk.f_ffree

    def kill(self) -> None:
        """Ends the process and all that it started, from any thread and at any time."""
        with self._kill_lock, contextlib.suppress(ProcessLookupError):
            if self._first is not None:
                # The namespace's first process: its end is the end of all others in it.
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            elif self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> str:
        """Ends the process, waits until nothing of it is left, and returns the end of its stderr.

        Call it once.
        """
        self.kill()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            # Less than the whole, but what can still be done.
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        with self._kill_lock:
            if self._first is not None:
                _await_end(self._first)
                os.close(self._first)
                self._first = None
        self._remove_folder()
        self._stderr.seek(0)
        dump = self._stderr.read().decode(errors="replace")
        self._stderr.close()
        return dump[-_MAX_STDERR_CHARS:]

    def _start_walled(self) -> subprocess.Popen[bytes]:
        packages = [f"/packages/{number}" for number in range(len(_package_folders()))]
        worker = _worker_command("/python/bin/python", "/python/worker.py")
        with _pipe() as (info, to_info), _pipe() as (from_filter, filter_):
            filter_.write(filter_program())
            filter_.close()
            inherited = (to_info.fileno(), from_filter.fileno())
            command = [*_wall(self._limits, *inherited), *worker, self._settings(packages)]
            process = self._popen(command, None, inherited)
            to_info.close()
            self._first_pid = _first_pid(info)
        # Where bubblewrap itself failed there is none, and the end of its pipe will tell.
        if self._first_pid:
            try:
                self._first = os.pidfd_open(self._first_pid)
            except ProcessLookupError:
                return process
            except OSError as error:
                process.kill()
                process.wait()
                raise SandboxError(
                    f"The sandbox needs Linux 5.3 or later, for pidfd_open: {error}"
                ) from error
        return process

    def _start_plain(self) -> subprocess.Popen[bytes]:
        worker = _worker_command(sys.executable, str(_WORKER))
        return self._popen([*worker, self._settings(_package_folders())], self._folder, ())

    def _popen(
        self, command: Sequence[str], folder: str | None, descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            cwd=folder,
            env=_environment(folder or "/tmp"),
            pass_fds=descriptors,
            start_new_session=True,
        )

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _settings(self, packages: Sequence[str]) -> str:
        return json.dumps({"packages": packages, "limits": self._limits.of_process})


def _bubblewrap() -> str:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "bubblewrap (the program bwrap), which walls off the Python tool, was not found. "
            "Install it, as with `apt-get install bubblewrap` or `dnf install bubblewrap`. Only "
            "where the code is trusted, set the tool's sandbox to unsafe."
        )
    return program


def _wall(limits: Limits, info: int, seccomp: int) -> list[str]:
    """The bubblewrap command, up to the program to run."""
    command = [_bubblewrap(), "--unshare-all", "--unshare-user"]
    command += ["--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    command += ["--info-fd", str(info), "--seccomp", str(seccomp)]
    for library in map(Path, _SYSTEM_LIBRARIES):
        if library.is_symlink():
            command += ["--symlink", os.readlink(library), str(library)]
        elif library.is_dir():
            command += ["--ro-bind", str(library), str(library)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # Where a virtual environment stands on another installation, that one.
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    command += ["--ro-bind", str(python), "/python/bin/python"]
    for name in ("lib", "lib64"):
        command += ["--ro-bind-try", str(Path(sys.base_prefix) / name), f"/python/{name}"]
    command += ["--ro-bind", str(_WORKER), "/python/worker.py"]
    for number, folder in enumerate(_package_folders()):
        command += ["--ro-bind", folder, f"/packages/{number}"]
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # The root is memory too, of no limited size.
    return [*command, "--remount-ro", "/"]


def _worker_command(python: str, worker: str) -> list[str]:
    """Python without its site-packages, start-up files and compiled copies."""
    return [python, "-P", "-s", "-S", "-B", worker]


def _package_folders() -> list[str]:
    """The folders that hold the packages which the code may import."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    origins = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    return list(dict.fromkeys(str(origin.parents[1]) for origin in origins))


def _environment(home: str) -> dict[str, str]:
    """The whole environment: nothing of this process's own goes in."""
    threads = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")
    return {
        **{f"{name}_NUM_THREADS": "1" for name in threads},
        "HOME": home,
        "LC_ALL": "C.UTF-8",
        "LD_LIBRARY_PATH": "/python/lib:/python/lib64",
        "MPLCONFIGDIR": home,
        "PATH": os.defpath,
        "PYTHONHASHSEED": "0",
    }


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as out, os.fdopen(write, "wb", buffering=0) as into:
        yield out, into


def _first_pid(info: IO[bytes]) -> int:
    """The first process of the namespace, as bubblewrap tells it; 0 where it ended before."""
    text = b""
    while chunk := info.read(4096):
        text += chunk
        # Not up to the end: a process that was forked meanwhile may hold the pipe open.
        with contextlib.suppress(ValueError):
            return int(json.loads(text)["child-pid"])
    return 0


def _await_end(process: int) -> None:
    """Waits for the end of a process that is a child of this one at most by inheritance."""
    with selectors.PollSelector() as selector:
        selector.register(process, selectors.EVENT_READ)
        selector.select(_KILL_S)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
