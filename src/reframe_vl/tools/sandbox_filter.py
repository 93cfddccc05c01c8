"""The system calls that sandboxed code may not make, as a filter program for the kernel.

Three groups are denied: what would start a process or a thread (so that one thread is all there is:
nothing multiplies, nothing outlives a call, and the limits of one process are the limits of the
sandbox), what takes memory that those limits do not count, and what reaches other processes, the
network or rarely used parts of the kernel.
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column of ``_DENIED``, and the kernel's own constant (AUDIT_ARCH_*)."""

_DENIED: dict[str, tuple[int | None, int | None]] = {
    # Processes and threads; clone3 comes below.
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execveat": (322, 281),
    # The network. io_uring would open sockets past this filter; vsock is in no namespace.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Memory outside the limits.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Taken from a number that the whole machine shares.
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # The rest of the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
"""Numbers on x86_64 and aarch64; None where the machine has no such call."""

_CLONE3 = 435
"""The same on both. The C library takes ENOSYS as leave to use ``clone``, which is refused."""

_X32 = 0x40000000
"""From here on x86_64 has the same calls once more, under other numbers."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def filter_program() -> bytes:
    """The program for this machine, in the kernel's form (an array of ``struct sock_filter``).

    Raises:
        ValueError: The numbers of this machine's system calls are not known here.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(
            f"The sandbox has no filter of system calls for {machine}: it can run on "
            f"{' and '.join(_ARCHITECTURES)}."
        )
    column, architecture = _ARCHITECTURES[machine]
    numbers = [pair[column] for pair in _DENIED.values()]
    denied = sorted(number for number in numbers if number is not None)
    # Ends in: allow, deny, not there, kill. A jump is so many instructions further.
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 0, len(denied) + 6, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, len(denied) + 2, 0, _X32),
        (_EQUAL, len(denied) + 2, 0, _CLONE3),
        *((_EQUAL, len(denied) - place, 0, number) for place, number in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _KILL),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
