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
import json
import math
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError, run_twice
from bapo_megatron.sandbox.cgroup import create_cgroup, left_behind
from bapo_megatron.sandbox.seccomp import seccomp_filter

if TYPE_CHECKING:
    from bapo_megatron.config.sandbox import SandboxConfig
    from bapo_megatron.sandbox.base import Ending

_FIRST_UID, _NUM_SLOTS = 60578, 606
"""User ids that neither distributions nor systemd give to anyone (systemd.io/UIDS-GIDS)."""
_SYSTEM = ("usr/bin", "usr/lib", "usr/lib64", "usr/local/bin", "usr/local/lib")
_LINKED = ("bin", "lib", "lib64")
_SHARED_MEMORY_BYTES = 16 << 20
_MAX_FILES = 256
_MAX_CPU_FACTOR = 20
"""CPU time of each process of a session, over ``timeout_s``: a bound for threads that a cell left
behind."""
_START_TIMEOUT_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
_MARK_BYTES = 16
_SAID = "bwrap: "
_KILLED = 128 + signal.SIGKILL
"""bubblewrap's exit status for a program that got SIGKILL."""
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
        cpu_s = math.ceil(_MAX_CPU_FACTOR * self._config.timeout_s)
        return Session(self._config, self._start("cells", cpu_s))

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
        return _outcome(process, content, config.timeout_s, config.max_output_bytes)

    def _prepare(self, slot: _Slot) -> tuple[str, str]:
        if self._prepared is None:
            program = [str(self._config.python), "-s", "-c", _PREPARE]
            process = SandboxedProcess(self._command, program, self._filter, slot)
            outcome = _outcome(process, _RUNNER.encode(), _START_TIMEOUT_S, _CHUNK)
            if outcome.ending != "ok":
                [*_, said] = ["", *outcome.stderr.splitlines()]
                raise SandboxError(
                    f"{self._config.python} does not run in the sandbox: {outcome.ending} {said}; "
                    "choose another interpreter (sandbox.python), or raise the limits"
                )
            code, _, path = outcome.stdout.partition("\n")
            self._prepared = code, path
        return self._prepared

    def _start(
        self,
        kind: str,
        cpu_s: int | None = None,
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
        if cpu_s is not None:
            limits["RLIMIT_CPU"] = cpu_s
        text = ",".join(f"{name}={value}" for name, value in limits.items())
        with contextlib.ExitStack() as on_close:
            if slot is None:
                slot = _Slot(config)
                on_close.callback(slot.release)
            code, path = self._prepare(slot)
            program = [str(config.python), "-s", "-S", "-c", _START, code, kind, text, path]
            process = SandboxedProcess(self._command, program, self._filter, slot, stderr)
            self._processes.add(process)
            on_close.callback(self._processes.discard, process)
            process.on_close = on_close.pop_all()
        return process


def _outcome(
    process: SandboxedProcess, content: bytes, timeout_s: float, max_output_bytes: int
) -> Outcome:
    with contextlib.closing(process):
        exchange = _Exchange(process, content, max_output_bytes)
        ending = exchange.run(timeout_s)
        return Outcome(ending, *exchange.texts()) if ending else process.outcome(exchange)


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
        mark = os.urandom(_MARK_BYTES)
        limit = self._config.max_output_bytes
        exchange = _Exchange(self._process, mark + _frame(cell), limit, mark)
        is_over = True
        try:
            ending = exchange.run(timeout_s or self._config.timeout_s)
            if ending:
                return Outcome(ending, *exchange.texts())
            if exchange.status is None:
                return self._process.outcome(exchange)
            is_over = False
            return Outcome("ok" if exchange.status == b"0" else "error", *exchange.texts())
        finally:
            if is_over:
                self.close()

    def close(self) -> None:
        """End all of its processes. Safe to call twice."""
        self._process.close()


class SandboxedProcess:
    """A running sandbox, which waits for its first frame."""

    def __init__(
        self,
        command: list[str],
        program: list[str],
        seccomp: bytes,
        slot: _Slot,
        stderr: int | None = subprocess.PIPE,
    ) -> None:
        self._cgroup = slot.cgroup
        self._num_killed = 0 if slot.cgroup is None else slot.cgroup.num_killed()
        self._init: int | None = None
        self.on_close = contextlib.ExitStack()
        """Callbacks that ``close`` runs last."""
        with contextlib.ExitStack() as theirs:
            status, status_end = os.pipe()
            theirs.callback(os.close, status_end)
            block_end, block = os.pipe()
            theirs.callback(os.close, block_end)
            filter_end = _pipe_with(seccomp)
            theirs.callback(os.close, filter_end)
            options = zip(
                ("--json-status-fd", "--block-fd", "--seccomp"),
                (status_end, block_end, filter_end),
                strict=True,
            )
            arguments = [word for name, end in options for word in (name, str(end))]
            self._status = os.fdopen(status, "rb")
            self.process = subprocess.Popen(
                [*slot.as_user, *command, *arguments, *program],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd="/",
                env={},  # /proc/1/environ of the sandbox
                pass_fds=(status_end, block_end, filter_end),
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        try:
            self._init_pid = self._read_status().get("child-pid", 0)
            self._init = os.pidfd_open(self._init_pid)  # an OSError if it has ended
            if self._cgroup is not None:
                self._cgroup.add(self._init_pid)
            os.write(block, b"x")
        except OSError as error:
            reason = self._error()
            self.close()
            raise _refused(reason) from error
        except BaseException:
            self.close()
            raise
        finally:
            os.close(block)

    def outcome(self, exchange: _Exchange) -> Outcome:
        """Return the outcome of a process that has ended by itself.

        Raises:
            SandboxLostError: It was killed.
        """
        self.process.wait()
        status = self._read_status().get("exit-code")
        stdout, stderr = exchange.texts()
        if self._cgroup is not None and self._cgroup.num_killed() > self._num_killed:
            return Outcome("memory", stdout, stderr)
        outcome = Outcome("ok" if status == 0 else "error", stdout, stderr)
        [*_, said] = ["", *stderr.splitlines()]
        if status is None and said.startswith(_SAID):
            raise _refused(said)
        if status in (None, _KILLED):
            raise SandboxLostError(
                "a sandbox was killed while a program ran in it; see the kernel's log (is there "
                "enough memory?)",
                None if status is None else outcome,
            )
        return outcome

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has ended it."""
        return self._status.closed

    def close(self) -> None:
        """Kill every process and wait until none is left; safe to call twice."""
        if self._status.closed:
            return
        if not self._kill_init():
            self.process.kill()
        for stream in (self.stdin, self.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()
        if self._init is not None:
            # The monitor may leave init, which ends last of its namespace, to the next reaper.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._init_pid, 0)
            os.close(self._init)
        self._status.close()
        self.on_close.close()

    def _kill_init(self) -> bool:
        """Kill init, and so all that it started; return False if there is none."""
        if self._init is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        return True

    def _read_status(self) -> dict[str, int]:
        ready, _, _ = select.select([self._status], [], [], _START_TIMEOUT_S)
        line = self._status.readline() if ready else b""
        return json.loads(line) if line else {}

    def _error(self) -> str:
        self.process.kill()
        self._kill_init()  # it has standard error too
        if self.process.stderr is None:
            return "it says why above"
        lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it was killed"


def _refused(said: str) -> SandboxError:
    return SandboxError(
        f"bubblewrap does not start: {said.removeprefix(_SAID)}; it needs unprivileged user "
        "namespaces, and read access to sandbox.python and sandbox.read_only (docs/security.md)"
    )


def _pipe_with(content: bytes) -> int:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        stream.write(content)  # less than a pipe holds
    return reader


class _Exchange:
    """Sends a program its input and takes its output, up to a limit of time and size."""

    def __init__(
        self, process: SandboxedProcess, content: bytes, max_output_bytes: int, mark: bytes = b""
    ) -> None:
        self._process = process
        self._content = memoryview(content)
        self._max_output_bytes = max_output_bytes
        self._mark = mark
        self.status: bytes | None = None
        """The byte after the mark, once it has come; neither is in the output."""
        assert process.process.stderr is not None
        self._outputs = {process.stdout: bytearray(), process.process.stderr: bytearray()}

    def run(self, timeout_s: float) -> Ending | None:
        """Return the limit that was exceeded, or None at the end of the output, or at the mark."""
        deadline_s = time.monotonic() + timeout_s
        stdin = self._process.stdin
        os.set_blocking(stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            for stream, output in self._outputs.items():
                selector.register(stream, selectors.EVENT_READ, output)
            while any(stream in selector.get_map() for stream in self._outputs):
                remaining_s = deadline_s - time.monotonic()
                ready = selector.select(remaining_s) if remaining_s > 0 else []
                if not ready:
                    return "timeout"
                for key, _ in ready:
                    self._write(selector) if key.fileobj is stdin else self._read(selector, key)
                if max(map(len, self._outputs.values())) > self._max_output_bytes:
                    return "output"
                if self.status is not None:
                    return None
        try:
            self._process.process.wait(max(deadline_s - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            return "timeout"
        return None

    def texts(self) -> list[str]:
        """Return standard output and error, each up to the limit."""
        return [
            bytes(output[: self._max_output_bytes]).decode(errors="replace")
            for output in self._outputs.values()
        ]

    def _write(self, selector: selectors.BaseSelector) -> None:
        stdin = self._process.stdin
        try:
            self._content = self._content[os.write(stdin.fileno(), self._content[:_CHUNK]) :]
        except BrokenPipeError:
            self._content = self._content[:0]
        if not self._content:
            selector.unregister(stdin)
            if not self._mark:
                stdin.close()

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        part, output = os.read(key.fd, _CHUNK), key.data
        output += part
        place = len(output) - len(self._mark) - 1
        if self._mark and place >= 0 and output.startswith(self._mark, place):
            self.status = bytes(output[-1:])
            del output[place:]
        if not part:
            selector.unregister(key.fileobj)
