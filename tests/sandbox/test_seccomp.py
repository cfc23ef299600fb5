"""The filter, interpreted here, for the system calls of the kernel's own headers."""

import errno
import re
import struct
from pathlib import Path

import pytest

from bapo_megatron.sandbox.seccomp import seccomp_filter

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NAMES = """
acct add_key bpf chroot delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick
init_module io_setup io_uring_enter io_uring_register io_uring_setup kcmp kexec_file_load
kexec_load keyctl lookup_dcookie memfd_create memfd_secret migrate_pages mount mount_setattr
move_mount move_pages mq_open msgget name_to_handle_at open_by_handle_at open_tree perf_event_open
personality pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev ptrace
quotactl quotactl_fd reboot request_key semget set_mempolicy setns shmget swapoff swapon syslog
umount2 unshare userfaultfd vmsplice
"""
X86_ONLY = ("ioperm", "iopl", "modify_ldt", "uselib")


def verdict(
    machine: str,
    number: int,
    argument: int = 0,
    architecture: int | None = None,
    **options: bool,
) -> int:
    """What the kernel would do, by an interpreter of classic BPF."""
    data = struct.pack(
        "=IIQ6Q", number, architecture or ARCHITECTURE[machine], 0, argument, *[0] * 5
    )
    program = list(struct.iter_unpack("=HBBI", seccomp_filter(machine, **options)))
    place = accumulator = 0
    while True:
        operation, if_true, if_false, operand = program[place]
        place += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            [accumulator] = struct.unpack_from("=I", data, operand)
        else:
            is_true = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: accumulator & operand != 0,
            }[operation]
            place += if_true if is_true else if_false


@pytest.fixture(params=HEADERS)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def numbers(machine: str) -> dict[str, int]:
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]}")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n"
    found = re.findall(pattern, HEADERS[machine].read_text())
    return {name: int(number) for name, number in found}


def test_the_listed_calls_fail_and_no_others(machine: str, numbers: dict[str, int]) -> None:
    refused = {*NAMES.split(), *X86_ONLY} if machine == "x86_64" else {*NAMES.split()}
    failed = {name for name, n in numbers.items() if verdict(machine, n) == ERROR | errno.EPERM}
    assert failed == refused
    absent = {name for name, n in numbers.items() if verdict(machine, n) == ERROR | errno.ENOSYS}
    newer = {name for name, number in numbers.items() if number > 451}
    assert absent == {"clone3", "timer_create"} | newer


def test_calls_of_the_future_and_of_x32_do_not_exist(machine: str) -> None:
    for number in (452, 463, 1 << 20, 0x40000000 + 39, 0xFFFFFFFF):
        assert verdict(machine, number) == ERROR | errno.ENOSYS


def test_another_architecture_ends_the_program(machine: str) -> None:
    assert verdict(machine, 0, architecture=0x40000003) == KILL


def test_threads_can_be_started_but_no_namespaces(machine: str, numbers: dict[str, int]) -> None:
    clone = numbers["clone"]
    assert verdict(machine, clone, 0x003D0F00) == ALLOW  # pthread_create's flags
    for bit in (7, 17, 25, 26, 27, 28, 29, 30):  # CLONE_NEWTIME, NEWNS, … NEWNET
        assert verdict(machine, clone, 0x11 | 1 << bit) == ERROR | errno.EPERM


@pytest.mark.parametrize(("allows_loopback", "allowed"), [(False, {1}), (True, {1, 2})])
def test_sockets_are_unix_ones_and_agents_may_use_the_loopback_of_their_namespace(
    machine: str, numbers: dict[str, int], allows_loopback: bool, allowed: set[int]
) -> None:
    for family in (0, 1, 2, 10, 16, 17, 38, 40):
        ended = verdict(machine, numbers["socket"], family, allows_loopback=allows_loopback)
        assert ended == (ALLOW if family in allowed else ERROR | errno.EAFNOSUPPORT)


def test_other_machines_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="x86_64 and aarch64, this is riscv64"):
        seccomp_filter("riscv64")
