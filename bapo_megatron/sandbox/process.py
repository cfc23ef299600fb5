"""A running sandbox: its processes from the first to the last, its input and its output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError

if TYPE_CHECKING:
    from bapo_megatron.sandbox.base import Ending
    from bapo_megatron.sandbox.cgroup import Cgroup

START_TIMEOUT_S = 20.0
"""Time limit of bubblewrap's start."""
_PAUSE_TIMEOUT_S = 1.0
CHUNK_BYTES = 1 << 16
"""Most bytes that are read or written at a time."""
_SAID = "bwrap: "
_KILLED = 128 + signal.SIGKILL
"""bubblewrap's exit status for a program that got SIGKILL."""


class SandboxedProcess:
    """A running sandbox, which waits for its first frame."""

    def __init__(
        self,
        command: list[str],
        program: list[str],
        seccomp: bytes,
        cgroup: Cgroup | None,
        stderr: int | None = subprocess.PIPE,
    ) -> None:
        """Start ``program`` by ``command``, which is bubblewrap's, in a control group if any."""
        self._cgroup = cgroup
        self._num_killed = 0 if cgroup is None else cgroup.num_killed()
        self._init: int | None = None
        self._program: int | None = None
        """The program's pidfd, once it has been paused."""
        self.on_close = contextlib.ExitStack()
        """Callbacks that ``close`` runs last."""
        with contextlib.ExitStack() as theirs:
            status, status_end = os.pipe()
            theirs.callback(os.close, status_end)
            block_end, block = os.pipe()
            theirs.callback(os.close, block_end)
            filter_end, writer = os.pipe()
            theirs.callback(os.close, filter_end)
            with os.fdopen(writer, "wb") as stream:
                stream.write(seccomp)  # less than a pipe holds
            arguments = ["--json-status-fd", str(status_end), "--block-fd", str(block_end)]
            arguments += ["--seccomp", str(filter_end)]
            self._status = os.fdopen(status, "rb")
            self.process = subprocess.Popen(
                [*command, *arguments, *program],
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

    def outcome(self, exchange: Exchange, ending: Ending | None = None) -> Outcome:
        """Return the outcome of a process that has ended by itself, of this kind or its status'.

        Raises:
            SandboxLostError: It was killed.
        """
        self.process.wait()
        status = self._read_status().get("exit-code")
        stdout, stderr = exchange.texts()
        if self._cgroup is not None and self._cgroup.num_killed() > self._num_killed:
            return Outcome("memory", stdout, stderr)
        outcome = Outcome(ending or ("ok" if status == 0 else "error"), stdout, stderr)
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

    def pause(self) -> bool:
        """Stop the program until ``resume``; False if it has child processes, which may fork on."""
        with contextlib.suppress(OSError, ValueError):
            [pid] = _children(self._init_pid)
            if self._program is None:
                self._program = os.pidfd_open(pid)
                self.on_close.callback(os.close, self._program)
            signal.pidfd_send_signal(self._program, signal.SIGSTOP)
            deadline_s = time.monotonic() + _PAUSE_TIMEOUT_S
            while not _is_stopped(pid) and time.monotonic() < deadline_s:
                time.sleep(0.0005)
            return _is_stopped(pid) and _children(self._init_pid) == [pid] and not _children(pid)
        return False

    def resume(self) -> None:
        """Let the program go on if it is paused."""
        if self._program is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._program, signal.SIGCONT)

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
        ready, _, _ = select.select([self._status], [], [], START_TIMEOUT_S)
        line = self._status.readline() if ready else b""
        return json.loads(line) if line else {}

    def _error(self) -> str:
        self.process.kill()
        self._kill_init()  # it has standard error too
        if self.process.stderr is None:
            return "it says why above"
        lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it was killed"


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _is_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def _refused(said: str) -> SandboxError:
    return SandboxError(
        f"bubblewrap does not start: {said.removeprefix(_SAID)}; it needs unprivileged user "
        "namespaces, and read access to sandbox.python and sandbox.read_only (docs/security.md)"
    )


class Exchange:
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
            self._content = self._content[os.write(stdin.fileno(), self._content[:CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._content = self._content[:0]
        if not self._content:
            selector.unregister(stdin)
            if not self._mark:
                stdin.close()

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        part, output = os.read(key.fd, CHUNK_BYTES), key.data
        output += part
        place = len(output) - len(self._mark) - 1
        if self._mark and place >= 0 and output.startswith(self._mark, place):
            self.status = bytes(output[-1:])
            del output[place:]
        if not part:
            selector.unregister(key.fileobj)


def outcome_of(
    process: SandboxedProcess, content: bytes, timeout_s: float, max_output_bytes: int
) -> Outcome:
    """Send a program all of its input; return its outcome once it has ended, and close it.

    Raises:
        SandboxLostError: It was killed.
    """
    with contextlib.closing(process):
        exchange = Exchange(process, content, max_output_bytes)
        ending = exchange.run(timeout_s)
        return Outcome(ending, *exchange.texts()) if ending else process.outcome(exchange)
