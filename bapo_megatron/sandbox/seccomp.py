"""The system calls that a program in the sandbox may not make, as a filter for the kernel.

``seccomp_filter`` assembles a classic BPF program over ``struct seccomp_data``: number (offset 0),
architecture (4), arguments (from 16, 8 bytes each). It refuses

- what reaches beyond the sandbox's own processes and files, or is rarely used and often broken;
- what neither rlimits nor the sizes of file systems bound: memory of memfd, System V and message
  queues, contexts of io_setup;
- new namespaces, and sockets other than Unix ones and, for agents, IPv4 on their loopback;
- calls newer than ``_NEWEST``, which nobody has judged, and those of other architectures (x32).

Numbers: Linux 6.x, ``asm/unistd_64.h`` of x86-64 and ``asm-generic/unistd.h``, which is AArch64's.
"""

import errno
import platform
import struct
from typing import NamedTuple

_ABSENT = -1
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, _ABSENT),
    "iopl": (172, _ABSENT),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, _ABSENT),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, _ABSENT),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
"""Calls that fail with EPERM, and their numbers on x86-64 and AArch64."""
_CLONE, _SOCKET = (56, 220), (41, 198)
_TIMER_CREATE = (222, 107)
"""Its timers can continue a process that ``SIGSTOP`` has stopped."""
_CLONE3 = 435
"""Its flags lie in memory, which a filter cannot read; without it libc calls ``clone``."""
_NEWEST = 451
_AF_UNIX, _AF_INET = 1, 2
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and AUDIT_ARCH."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


class _Line(NamedTuple):
    """An instruction; a jump leads to a later line by its name, "" to the next one."""

    operation: int
    operand: int
    if_true: str = ""
    if_false: str = ""
    name: str = ""


def seccomp_filter(machine: str = platform.machine(), *, allows_loopback: bool = False) -> bytes:
    """Return the filter for bubblewrap's ``--seccomp``: an array of ``struct sock_filter``.

    ``allows_loopback``: also IPv4, which leads nowhere else in a network namespace of its own.

    Raises:
        ValueError: The tables have no numbers for this machine.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(
            f"programs can be run on {' and '.join(_ARCHITECTURES)}, this is {machine}; add its "
            "system calls to sandbox/seccomp.py"
        )
    column, architecture = _ARCHITECTURES[machine]
    ends = {
        "family": _ERROR | errno.EAFNOSUPPORT,  # first, since no jump leads here
        "allow": _ALLOW,
        "kill": _KILL,
        "refuse": _ERROR | errno.EPERM,
        "absent": _ERROR | errno.ENOSYS,
    }
    refused = [numbers[column] for numbers in _REFUSED.values() if numbers[column] != _ABSENT]
    lines = [
        _Line(_LOAD, _ARCHITECTURE),
        _Line(_EQUAL, architecture, if_false="kill"),
        _Line(_LOAD, _NUMBER),
        _Line(_AT_LEAST, _NEWEST + 1, if_true="absent"),  # also x32's, which have bit 30
        _Line(_EQUAL, _CLONE3, if_true="absent"),
        _Line(_EQUAL, _TIMER_CREATE[column], if_true="absent"),
        *(_Line(_EQUAL, number, if_true="refuse") for number in sorted(refused)),
        _Line(_EQUAL, _CLONE[column], if_true="clone"),
        _Line(_EQUAL, _SOCKET[column], if_true="socket", if_false="allow"),
        _Line(_LOAD, _ARGUMENT, name="clone"),
        _Line(_ANY_BIT, _NEW_NAMESPACES, if_true="refuse", if_false="allow"),
        _Line(_LOAD, _ARGUMENT, name="socket"),
        _Line(_EQUAL, _AF_UNIX, if_true="allow"),
        *[_Line(_EQUAL, _AF_INET, if_true="allow")] * allows_loopback,
        *(_Line(_RETURN, value, name=name) for name, value in ends.items()),
    ]
    places = {line.name: number for number, line in enumerate(lines) if line.name}
    content = b""
    for number, line in enumerate(lines):
        jumps = [places[to] - number - 1 if to else 0 for to in (line.if_true, line.if_false)]
        content += struct.pack("=HBBI", line.operation, *jumps, line.operand)
    return content
