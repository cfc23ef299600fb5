"""CPython in Linux namespaces, by bubblewrap (``bwrap``), one sandbox for each program.

    this process → bwrap (monitor) → bwrap (init of the new namespaces) → python → …

The program is sent only once this process holds a handle of init and has moved it into its control
group. When init ends, the kernel ends every process of its namespace; the monitor ends init when
this process dies. docs/security.md says what each part holds off, tests/sandbox/ tries it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.sandbox.base import Outcome, SandboxError, run_twice
from bapo_megatron.sandbox.cgroup import create_cgroup, left_behind
from bapo_megatron.sandbox.process import (
    CHUNK_BYTES,
    START_TIMEOUT_S,
    Exchange,
    SandboxedProcess,
    outcome_of,
)
from bapo_megatron.sandbox.seccomp import seccomp_filter

if TYPE_CHECKING:
    from bapo_megatron.config.sandbox import SandboxConfig

_FIRST_UID, _NUM_SLOTS = 60578, 606
"""User ids that neither distributions nor systemd give to anyone (systemd.io/UIDS-GIDS)."""
_SYSTEM = ("usr/bin", "usr/lib", "usr/lib64", "usr/local/bin", "usr/local/lib")
_LINKED = ("bin", "lib", "lib64")
_SHARED_MEMORY_BYTES = 16 << 20
_MAX_FILES = 256
_PR_SET_CHILD_SUBREAPER = 36
_MARK_BYTES = 16
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # cells that run again must do the same; python -I would ignore it
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each takes 64 MB of address space
}
_RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")
_PREPARE = """import marshal, sys
print(marshal.dumps(compile(sys.stdin.read(), "<runner>", "exec")).hex())
print(*sys.path[1:], sep="\\n")
"""
_START = "import marshal, sys; exec(marshal.loads(bytes.fromhex(sys.argv.pop(1))))"
"""Starts the runner without what takes a third of the time of a short program: compiling it, and
``site``, which extends ``sys.path``."""


class _Slot:
    """A number that only one sandbox of this machine has, with its user id and control group."""

    def __init__(self, config: SandboxConfig) -> None:
        setpriv = _installed("setpriv", "util-linux") if os.geteuid() == 0 else None
        self._lock, self.number = _take_number()
        self.uid = None if setpriv is None else _FIRST_UID + self.number
        """The user of the program; None: this process's."""
        self.as_user: list[str] = []
        """What a command begins with so that this user runs it."""
        if setpriv is not None:
            # Popen would have to copy this process's page tables to change the user itself.
            self.as_user = [setpriv, f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        self.cgroup = create_cgroup(self.number, config.memory_limit_mb << 20, config.processes + 1)

    def release(self) -> None:
        if self.cgroup is not None:
            self.cgroup.remove()
        self._lock.close()


def _installed(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(
            f"{package} ({name}) is not installed, and programs run nowhere else; install it "
            f"(Debian: apt-get install {package})"
        )
    return path


def _take_number() -> tuple[socket.socket, int]:
    for number, groups in left_behind().items():
        if (lock := _lock(number)) is not None:  # its process was killed
            with lock:
                for group in groups:
                    with contextlib.suppress(OSError):  # its last process is ending
                        group.rmdir()
    for number in range(_NUM_SLOTS):
        if (lock := _lock(number)) is not None:
            return lock, number
    raise SandboxError(
        f"all {_NUM_SLOTS} slots for sandboxes are in use on this machine; use fewer workers"
    )


def _lock(number: int) -> socket.socket | None:
    # An abstract socket: the kernel releases its name when the process ends, and no file is left.
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0bapo_megatron_sandbox_{number}")
    except OSError:
        lock.close()
        return None
    return lock


def open_sandbox(config: SandboxConfig) -> BubblewrapSandbox:
    """Open a sandbox and run a program of one line in it.

    Raises:
        SandboxError: It does not work here.
    """
    sandbox = BubblewrapSandbox(config)
    try:
        outcome = sandbox.run("print(6 * 7)")
        if (outcome.ending, outcome.stdout) != ("ok", "42\n"):
            said = (outcome.stderr or outcome.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise SandboxError(
                f"the sandbox must print 42 for 'print(6 * 7)', got '{outcome.ending}' and "
                f"{said[0]:.200}; check its memory_limit_mb, timeout_s and python"
            )
    except BaseException:
        sandbox.close()
        raise
    return sandbox


class BubblewrapSandbox:
    """Runs programs, one at a time; any number of sessions may be open beside it.

    It belongs to the thread that creates it. When its process ends, for whatever reason, so do the
    programs.
    """

    def __init__(self, config: SandboxConfig, *, allows_loopback: bool = False) -> None:
        """Find bubblewrap; nothing is started. See ``seccomp_filter`` for ``allows_loopback``.

        Raises:
            SandboxError: It is not installed, or this machine's architecture is not supported.
        """
        self._config = config
        bwrap = _installed("bwrap", "bubblewrap")
        places, target = (Path("/usr"), *config.read_only), config.python.resolve()
        if not any(target.is_relative_to(place.resolve()) for place in places):
            raise SandboxError(
                f"{config.python} is a link to {target}, which the sandbox does not show; add "
                f"{target.parent.parent} to read_only"
            )
        try:
            self._filter = seccomp_filter(allows_loopback=allows_loopback)
        except ValueError as error:
            raise SandboxError(str(error)) from error
        # Orphans of bubblewrap come to this process, since process 1 of a container may reap none.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._command = [bwrap, *_arguments(config)]
        atexit.register(self.close)
        self._slot: _Slot | None = None
        """The slot that ``run`` reuses; its programs run one at a time."""
        self._processes: set[SandboxedProcess] = set()
        self._prepared: tuple[str, str] | None = None
        """The runner, compiled by the interpreter in the sandbox, and that one's ``sys.path``."""

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program in a fresh sandbox.

        Raises:
            SandboxError: The sandbox failed twice.
        """
        content = _frame(program) + stdin.encode("utf-8", "surrogatepass")
        return run_twice(lambda: self._run_once(content))

    def session(self) -> Session:
        """Start an interpreter for cells; the caller closes it.

        Raises:
            SandboxError: It does not start.
        """
        return Session(self._config, self._start("cells"))

    def start(self, program: str, max_files: int = _MAX_FILES) -> SandboxedProcess:
        """Start a program in a sandbox of its own; the caller feeds, reads and closes it.

        ``program`` must fit into a pipe. Its standard error is this process's.
        ``max_files`` is how many descriptors each of its processes may have.

        Raises:
            SandboxError: It does not start.
        """
        process = self._start("program", stderr=None, max_files=max_files)
        try:
            process.stdin.write(_frame(program))
        except OSError as error:
            process.close()
            raise SandboxError(f"it ended before its program came: {error}") from error
        return process

    def describe(self) -> str:
        """Return what limits a program here, for people."""
        slot = self._own_slot()
        user = "your user id" if slot.uid is None else f"user ids from {_FIRST_UID}"
        config = self._config
        bound = f"memory {config.memory_limit_mb} MB by cgroup"
        if slot.cgroup is None:
            total_mb = config.memory_limit_mb * config.processes
            bound = f"no cgroup can be created: memory {total_mb} MB (processes × address space)"
        return f"{user}; {bound}"

    def close(self) -> None:
        """End all programs and release everything. Safe to call twice."""
        for process in list(self._processes):
            process.close()
        if self._slot is not None:
            self._slot.release()
            self._slot = None
        atexit.unregister(self.close)

    def _own_slot(self) -> _Slot:
        self._slot = self._slot or _Slot(self._config)
        return self._slot

    def _run_once(self, content: bytes) -> Outcome:
        process, config = self._start("program", slot=self._own_slot()), self._config
        return outcome_of(process, content, config.timeout_s, config.max_output_bytes)

    def _prepare(self, slot: _Slot) -> tuple[str, str]:
        if self._prepared is None:
            program = [str(self._config.python), "-s", "-c", _PREPARE]
            process = self._process(slot, program)
            outcome = outcome_of(process, _RUNNER.encode(), START_TIMEOUT_S, CHUNK_BYTES)
            if outcome.ending != "ok":
                [*_, said] = ["", *outcome.stderr.splitlines()]
                raise SandboxError(
                    f"{self._config.python} does not run in the sandbox: {outcome.ending} {said}; "
                    "choose another interpreter (sandbox.python), or raise the limits"
                )
            code, _, path = outcome.stdout.partition("\n")
            self._prepared = code, path
        return self._prepared

    def _process(
        self, slot: _Slot, program: list[str], stderr: int | None = subprocess.PIPE
    ) -> SandboxedProcess:
        command = [*slot.as_user, *self._command]
        return SandboxedProcess(command, program, self._filter, slot.cgroup, stderr)

    def _start(
        self,
        kind: str,
        slot: _Slot | None = None,
        stderr: int | None = subprocess.PIPE,
        max_files: int = _MAX_FILES,
    ) -> SandboxedProcess:
        """Start the runner; without ``slot`` in one that ``close`` releases."""
        config = self._config
        limits = {
            "RLIMIT_AS": config.memory_limit_mb << 20,
            "RLIMIT_NPROC": config.processes + 1,
            "RLIMIT_FSIZE": config.files_mb << 20,
            "RLIMIT_NOFILE": max_files,
            "RLIMIT_CORE": 0,
        }
        text = ",".join(f"{name}={value}" for name, value in limits.items())
        with contextlib.ExitStack() as on_close:
            if slot is None:
                slot = _Slot(config)
                on_close.callback(slot.release)
            code, path = self._prepare(slot)
            program = [str(config.python), "-s", "-S", "-c", _START, code, kind, text, path]
            process = self._process(slot, program, stderr)
            self._processes.add(process)
            on_close.callback(self._processes.discard, process)
            process.on_close = on_close.pop_all()
        return process


def _arguments(config: SandboxConfig) -> list[str]:
    """Return bubblewrap's arguments but for descriptors and the program."""
    mounts: list[str] = []
    for name in _LINKED:
        path = Path("/", name)
        if path.is_symlink():
            mounts += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            mounts += ["--ro-bind", str(path), str(path)]
    places = [Path("/", name) for name in _SYSTEM]
    mounts += [word for place in places if place.is_dir() for word in _read_only(place)]
    variables = [word for item in _ENVIRONMENT.items() for word in ("--setenv", *item)]
    return [
        *("--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid", "--unshare-net"),
        *("--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--clearenv", *variables, "--hostname", "sandbox"),
        *("--uid", "1000", "--gid", "1000", *mounts, "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(_SHARED_MEMORY_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/dev"),
        *("--size", str(config.files_mb << 20), "--perms", "1777", "--tmpfs", "/tmp"),
        *(word for place in config.read_only for word in _read_only(place)),
        *("--chdir", "/tmp", "--remount-ro", "/"),
    ]


def _read_only(place: Path) -> tuple[str, str, str]:
    return "--ro-bind", str(place), str(place)


def _frame(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return len(content).to_bytes(8, "big") + content


class Session:
    """An interpreter that keeps its variables between cells."""

    def __init__(self, config: SandboxConfig, process: SandboxedProcess) -> None:
        self._config = config
        self._process = process

    @property
    def has_ended(self) -> bool:
        """Whether it can run no further cell."""
        return self._process.is_closed

    def run(self, cell: str, timeout_s: float | None = None) -> Outcome:
        """Run a cell; the value of a last expression is printed, as by the interactive interpreter.

        ``timeout_s`` replaces the configured limit. After a limit the session ``has_ended``.

        Raises:
            SandboxLostError: The sandbox was killed; the session has ended.
        """
        self._process.resume()
        mark = os.urandom(_MARK_BYTES)
        limit = self._config.max_output_bytes
        exchange = Exchange(self._process, mark + _frame(cell), limit, mark)
        is_over = True
        try:
            ending = exchange.run(self._config.timeout_s if timeout_s is None else timeout_s)
            if ending:
                return Outcome(ending, *exchange.texts())
            if exchange.status is None:
                return self._process.outcome(exchange, "exit")
            is_over = False
            return Outcome("ok" if exchange.status == b"0" else "error", *exchange.texts())
        finally:
            if is_over:
                self.close()

    def pause(self) -> None:
        """Stop the interpreter until the next cell; close it if a cell left processes behind."""
        if not self._process.pause():
            self.close()

    def close(self) -> None:
        """End all of its processes. Safe to call twice."""
        self._process.close()
