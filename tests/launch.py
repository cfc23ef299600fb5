"""Starts the command line as a user would."""

import atexit
import contextlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests import distributed_launch
from tests.distributed_launch import rank_environment, start_fork, wait_for_ranks
from tests.rollout.forked_collector import forked_collectors

REPOSITORY = Path(__file__).resolve().parent.parent


def command(arguments: list[str], *, ranks: int = 1) -> list[str]:
    """The command line of ``bapo_megatron``; under torchrun for more than one rank."""
    if ranks == 1:
        return [sys.executable, "-m", "bapo_megatron", *arguments]
    return [
        sys.executable,
        "-m",
        "bapo_megatron.torchrun",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "bapo_megatron",
        *arguments,
    ]


def _environment(additions: dict[str, str]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ, "NO_COLOR": "1", **additions}


def start(
    arguments: list[str], *, ranks: int = 1, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start it in a process group of its own; output is captured."""
    return subprocess.Popen(
        command(arguments, ranks=ranks),
        cwd=REPOSITORY,
        env=_environment(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def torchrun(
    arguments: list[str], *, ranks: int, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it under torchrun to its end; a run that hangs is killed and fails the test."""
    process = start(arguments, ranks=ranks, environment=environment)
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running\n{out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def run(
    arguments: list[str],
    *,
    ranks: int = 1,
    timeout_s: float = 240,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; a run that hangs is killed and fails the test.

    Ranks are forks of a process that has imported everything: a start from nothing takes seconds.
    As under torchrun, one that fails ends the others.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # As torchrun's agent does, hold the store here: its port is ours from the start.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        places = [
            {**rank_environment(rank, ranks), "MASTER_PORT": str(store.port)}
            for rank in range(ranks)
        ]
        program = ["bapo_megatron", *arguments]
        processes = [
            start_fork(_main, program, _environment(place | (environment or {})), scratch)
            for place in (places if ranks > 1 else [{}])
        ]
        has_ended = wait_for_ranks(
            processes, timeout_s, stop=BaseProcess.terminate, kill=_kill_group
        )
        out, err = (Path(scratch, name).read_text() for name in ("out", "err"))
    assert has_ended, f"still running after {timeout_s} s\n{out}\n{err}"
    exit_code = next((code for process in processes if (code := process.exitcode)), 0)
    return subprocess.CompletedProcess(arguments, exit_code, out, err)


class Launched:
    """A command under torchrun that goes on; read like a ``Popen`` that captures output.

    The launcher and its ranks are forks, as in ``run``. ``program``: instead, what follows
    ``python -m``; it may run on the machine of a name (``tests.nodes``).
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        ranks: int = 2,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = (),
        node: str = "",
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        program = program or command([*arguments], ranks=ranks)[2:]
        additions = _environment(environment or {})
        self._process = start_fork(_launch, program, additions, self._scratch.name, node)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which is no error of Popen's
            os.kill(self.pid, number)

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for the end; returns standard output and error."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            raise AssertionError(f"still running\n{self.output()}") from None
        return self.output()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return status

    def output(self) -> tuple[str, str]:
        out, err = (Path(self._scratch.name, name) for name in ("out", "err"))
        return (out.read_text(), err.read_text()) if err.exists() else ("", "")


def _launch(program: list[str], environment: dict[str, str], scratch: str, node: str) -> None:
    if node:
        os.setns(os.open(f"/run/netns/{node}", os.O_RDONLY), os.CLONE_NEWNET)
    SubprocessHandler._popen = lambda _, args, env: _Rank(args, env, scratch)
    _main(program, environment, scratch)


class _Rank:
    """What torchrun uses of the ``Popen`` of a rank."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], scratch: str) -> None:
        program = list(command[command.index("-m") + 1 :])
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_be_rank, args=(program, environment, scratch))
        self._process.start()
        self.pid = self._process.pid

    poll, wait = Launched.poll, Launched.wait


def _be_rank(program: list[str], environment: dict[str, str], scratch: str) -> None:
    distributed_launch.forget_signal_handlers()  # torchrun's
    _main(program, environment, scratch)


def _kill_group(process: BaseProcess) -> None:
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)


def _main(program: list[str], environment: dict[str, str], scratch: str) -> None:
    """Be the process of ``python -m`` with a program."""
    os.setsid()
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(scratch, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one
    os.chdir(REPOSITORY)
    sys.argv = [str(REPOSITORY / "bapo_megatron" / "__main__.py"), *program[1:]]
    distributed_launch.forks_of_this_process()
    try:
        with forked_collectors():
            runpy.run_module(program[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def free_port() -> int:
    """A port that was free a moment ago, below those that the kernel gives to connections."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
