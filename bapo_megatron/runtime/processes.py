"""Child processes that never outlive their owner, their leftovers, and signals.

Each child runs in its own session, so that Ctrl-C reaches only the owner, which then stops its
children in order. A signal ends a process by an exception, so that every context manager cleans up.
Standard library only, because launchers of servers import this.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

OWNER_PID_VARIABLE = "BAPO_MEGATRON_OWNER_PID"
"""Environment variable with the process id of a child's owner."""

CLOSED_PIPE = 141
"""Exit status if the reader of the output is gone, as after SIGPIPE."""

RUN_DIR_FILE = "BAPO_MEGATRON_RUN_DIR_FILE"
"""Environment variable with the file to which rank 0 writes its run directory for ``torchrun``."""

_KILL_GRACE_S = 10.0
_POLL_S = 0.02
_STARTED = "--- started"
_TAIL_LINES = 12
_TAIL_BYTES = 64 << 10
# torchrun sets these for the ranks; a server that inherits them joins the wrong rendezvous.
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "PET_", "GROUP_", "ROLE_")
_TORCHRUN_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_SHARED_NAMES = "shared_files"
_PRIVATE_PREFIX = "bapo_megatron-"
_MAPPED_INODE = re.compile(r" (\d+) +/dev/shm/")
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_STACKS_SIGNAL = signal.SIGUSR2
_received: list[int] = []
_STDERR = 2
_DUMP_S = 0.05
"""Enough for one process to write its stacks before the next one writes to the same file."""
_RETRY_S = 0.01


def nccl_settings() -> dict[str, str]:
    """Return the environment variables that all members of an NCCL group must share.

    Engines choose other defaults than NCCL, as these are: mixed groups fail or hang.
    """
    return {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0")}


def launched_number(name: str, default: int) -> int:
    """Return a number, such as ``WORLD_SIZE``, that torchrun sets in the environment of a rank.

    Raises:
        ValueError: It is not a number.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    minimum = 1 if name.endswith("SIZE") else 0
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= minimum):
        raise ValueError(
            f"{name}: must be a whole number from {minimum} on, got '{text[:20]}'; unset it, or "
            "start ranks with python -m bapo_megatron.torchrun"
        )
    return int(text)


@contextlib.contextmanager
def environment_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable of this process during the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def child_environment() -> dict[str, str]:
    """Return this process's environment for a child, without torchrun's variables."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _TORCHRUN_NAMES and not name.startswith(_TORCHRUN_PREFIXES)
    }
    return {**environment, **nccl_settings(), OWNER_PID_VARIABLE: str(os.getpid())}


def end_group(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """Wait until a leader's process group is gone; kill it after ``grace_s``."""
    if not _wait_until_gone(process, grace_s):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _wait_until_gone(process, _KILL_GRACE_S)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _wait_until_gone(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while True:
        process.poll()  # reaps the leader, which would count as a member otherwise
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)


def shared_files(group_id: int, patterns: Iterable[str]) -> set[Path]:
    """Return a process group's files in /dev/shm, by the inodes that its processes have mapped.

    It must not share those of ``patterns`` with other groups. Names do not identify the owner.
    """
    inodes: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
            if os.getpgid(int(entry.name)) == group_id:
                inodes.update(map(int, _MAPPED_INODE.findall((entry / "maps").read_text())))
    files = set()
    for pattern in patterns:
        for path in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino in inodes:
                    files.add(path)
    return files


def unlink_shared_files(group_id: int, patterns: Iterable[str], known: Iterable[Path] = ()) -> None:
    """Unlink a group's ``shared_files``, and ``known`` ones of processes that have exited.

    A killed group would leave them forever. Running processes keep their mappings.
    """
    for path in {*known, *shared_files(group_id, patterns)}:
        path.unlink(missing_ok=True)


def own_compiler_cache() -> None:
    """Set torch.compile's cache, also for servers, to a directory that only this user can write to.

    The default, ``/tmp/torchinductor_<user>``, runs code that anyone may have written.

    Raises:
        ValueError: The directory belongs to, or is writable by, another user.
    """
    if _COMPILER_CACHE in os.environ:
        return
    path = Path(tempfile.gettempdir()) / f"bapo_megatron_compiled_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    is_users = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_users or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{path}: not a directory that only you can write to; set {_COMPILER_CACHE} to one"
        )
    os.environ[_COMPILER_CACHE] = str(path)


def kill_marked(name: str, prefix: str) -> None:
    """Kill this user's processes whose environment variable ``name`` begins with ``prefix``.

    They are the descendants of a process started with it, in any session. Does not wait for them.
    """
    mark = f"\0{name}={prefix}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            process = os.pidfd_open(int(entry.name))  # the id may be reused
            try:
                if mark in b"\0" + (entry / "environ").read_bytes():
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


class PrivateDirectory:
    """A directory for temporary files that only this user can enter, removed by ``close``.

    Its process holds a lock on it; the next process removes those that killed ones left unlocked.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        for path in root.glob(f"{_PRIVATE_PREFIX}*"):
            _remove_abandoned(path)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=root))
            # Another process may remove it as abandoned before it is locked.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def note_shared_files(self, files: Iterable[Path]) -> None:
        """Record files in /dev/shm to remove with the directory if this process is killed."""
        (self.path / _SHARED_NAMES).write_text("".join(f"{file.name}\n" for file in files))

    def close(self) -> None:
        """Remove the directory; safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(path: Path) -> None:
    """Remove a private directory of this user, and its shared files, if it is not locked."""
    with contextlib.suppress(OSError):  # another user's, or just removed
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            noted = path / _SHARED_NAMES
            for name in noted.read_text().splitlines() if noted.exists() else ():
                (Path("/dev/shm") / Path(name).name).unlink(missing_ok=True)
            shutil.rmtree(path)
        finally:
            os.close(lock)


def describe_exit(status: int) -> str:
    """Describe a return code: ``exit status 1`` or ``SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"


def open_log(path: Path) -> BinaryIO:
    """Open a child's log for appending, after those of earlier starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    log.write(f"{_STARTED} {time.strftime('%Y-%m-%d %H:%M:%S %z')} ---\n".encode())
    log.flush()
    return log


def tail(path: Path) -> str:
    """Return the last lines of a log since ``open_log``, indented, with the final progress bars."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            content = log.read().decode(errors="replace")
    except FileNotFoundError:
        return "    (no log)"
    _, started, since = content.rpartition(_STARTED)
    if started:
        content = since.partition("\n")[2]
    states = (line.rstrip().rpartition("\r")[2] for line in content.split("\n"))
    lines = deque((line for line in states if line), _TAIL_LINES)
    return "\n".join(f"    {line}" for line in lines) or "    (empty log)"


def write_stacks_on_signal() -> None:
    """Make SIGUSR2 write the stacks of all threads to standard error, even from within C code."""
    faulthandler.register(_STACKS_SIGNAL, _STDERR)


@contextlib.contextmanager
def stacks_appended_to(path: Path) -> Iterator[None]:
    """Within the block, append the stacks to a file, which is removed if empty at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        faulthandler.register(_STACKS_SIGNAL, file)
        try:
            yield
        finally:
            write_stacks_on_signal()
            with contextlib.suppress(FileNotFoundError):
                if not path.stat().st_size:
                    path.unlink()


def request_stacks() -> list[int]:
    """Send SIGUSR2 to this process and its descendants that handle it; return their ids.

    It would kill others, such as servers. A descendant's standard error gets a line with its id.
    """
    parents: dict[int, int] = {}
    handling: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
            fields = dict(
                line.split(":\t", 1) for line in status.read_text(errors="replace").splitlines()
            )
            pid = int(status.parent.name)
            parents[pid] = int(fields["PPid"])
            if int(fields["SigCgt"], 16) >> (_STACKS_SIGNAL - 1) & 1:
                handling.add(pid)
    family = [os.getpid()]
    for pid in family:  # it grows
        family += [child for child, parent in parents.items() if parent == pid]
    receivers = [pid for pid in family if pid in handling]
    for pid in receivers:
        if pid != os.getpid():
            with (
                contextlib.suppress(OSError),  # a socket, such as systemd's journal, or closed
                Path(f"/proc/{pid}/fd/{_STDERR}").open("a") as log,
            ):
                log.write(f"--- stacks of process {pid} ---\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STACKS_SIGNAL)
            time.sleep(_DUMP_S)
    return receivers


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when the thread that started it ends (Linux).

    Nothing is sent if the parent was gone before the call: compare ``os.getppid()`` with its known
    id, not with 1, which may be the parent in a container.
    """
    parent_pid = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)


class RequestedExit(SystemExit):
    """A SystemExit that this package raises; any other comes from user or library code."""


@contextlib.contextmanager
def forks_ended(report: Callable[[BaseException | None], object]) -> Iterator[None]:
    """End a forked child as soon as it leaves the block; the process itself continues.

    ``report`` first gets the child's error, or None; SystemExit is not reported. Python's exit
    handlers are skipped: they would unregister what an event loop shares with the parent, and flush
    the parent's files again.
    """
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            if not isinstance(error, SystemExit):
                report(error)
            _exit_forked(error)
        raise
    if os.getpid() != pid:
        report(None)
        _exit_forked(None)


def _exit_forked(error: BaseException | None) -> NoReturn:
    status = 1
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        status = int(error.code or 0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def end_by_exception() -> None:
    """Make the first SIGINT raise ``KeyboardInterrupt``, SIGTERM or SIGUSR1 ``RequestedExit``.

    They are raised in the main thread. Python drops exceptions raised within a finalizer or a weak
    reference's callback; ``sys.unraisablehook`` then raises them again a moment later.
    """
    for number in _SIGNALS:
        signal.signal(number, end_once)
    sys.unraisablehook = _end_later


def received_signal() -> int | None:
    """Return the signal for which ``end_by_exception`` has raised an exception."""
    return _received[0] if _received else None


def run_async[T](work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; a signal first cancels it, then raises its exception.

    Otherwise it would be raised in whichever task happens to run.
    """
    received: list[int] = []

    async def run() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "asyncio.run creates one"

        def cancel(number: int, frame: FrameType | None) -> None:
            _ignore_signals()
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        before = {number: signal.signal(number, cancel) for number in _SIGNALS}
        try:
            return await work
        finally:
            if not received:
                for number, handler in before.items():
                    signal.signal(number, handler)

    try:
        return asyncio.run(run())
    finally:
        if received:
            _raise(received[0])


def end_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal as described in ``end_by_exception``."""
    _received.append(number)
    _ignore_signals()
    _raise(number)


def _ignore_signals() -> None:
    """Keep a second signal from disturbing the cleanup: torchrun forwards the ranks' Ctrl-C."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise RequestedExit(128 + number)


def _end_later(unraisable: "sys.UnraisableHookArgs") -> None:
    dropped = unraisable.exc_value
    if not isinstance(dropped, KeyboardInterrupt | RequestedExit):
        sys.__unraisablehook__(unraisable)
        return
    number = signal.SIGINT if isinstance(dropped, KeyboardInterrupt) else signal.SIGTERM

    def try_again(alarm: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is _end_later.__code__:
                # The hook has not returned yet, and exceptions raised in it are dropped too.
                signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
                return
            frame = frame.f_back
        _raise(number)

    signal.signal(signal.SIGALRM, try_again)
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)


if __name__ == "__main__":
    # Become a command, ``sys.argv[1:]``, that gets SIGTERM when its owner is gone, even if killed.
    end_with_parent(signal.SIGTERM)
    if os.getppid() == int(os.environ[OWNER_PID_VARIABLE]):
        os.execv(sys.argv[1], sys.argv[1:])  # keeps the parent-death signal
