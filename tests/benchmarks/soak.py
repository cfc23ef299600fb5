"""A run of an hour through everything that a week on a cluster does to it.

python -m tests.benchmarks.soak --minutes 60 --out docs/benchmarks/soak_cpu_202611

Two ranks under examples/single_node.sh, started again by the same command as a requeued job is, and
three servers, each under examples/rollout_servers.sh. Two of them are there from the beginning,
the third one is added to the servers file. Then, at fixed shares of the time: a server freezes, the
job gets TERM, another server ends for good, one freezes again, rank 0 is killed, the disk fills up,
the job gets TERM again. Afterwards every group must have been trained once, dropped for a reason or
be in the buffer, and neither processes nor shared memory may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import yaml

from bapo_megatron.files import atomic_write_text
from bapo_megatron.processes import end_by_exception
from tests.benchmarks import harness
from tests.launch import REPOSITORY, free_port
from tests.trainer.chaos import assert_balanced, steps, write_config
from tests.trainer.dumps import make_random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS = {"BAPO_MEGATRON_ADMIN_API_KEY": "soak-admin" * 2, "BAPO_MEGATRON_API_KEY": "soak" * 4}
MARK = "BAPO_MEGATRON_SOAK"
"""Environment variable that every process of the run inherits."""
DISK_BYTES = 400 << 20
LAST_STEPS = 5
"""Steps that are left when the time is over."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done to the run."""

    at_s: float
    what: str
    step: int
    """Steps that had been made."""
    next_step_s: float
    """Until the next step was made."""
    exit_code: int | None
    """Exit status of the job, where it ended."""
    last_line: str
    """What the job said last, where it ended."""


@dataclass(slots=True)
class Soak:
    """The processes of the run, and what was done to them."""

    directory: Path
    config: Path
    minutes: float
    environment: dict[str, str]
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By address."""
    job: subprocess.Popen[bytes] | None = None
    starts: int = 0
    log_start: int = 0
    """Where the log of the last start begins, in bytes."""
    events: list[Event] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def run_dir(self) -> Path:
        """On a disk of its own, which can be filled."""
        return self.directory / "disk" / "run"

    @property
    def log(self) -> Path:
        """Everything that the jobs say, one after the other."""
        return self.directory / "job.log"

    def start_server(self, name: str) -> str:
        """Start a server on a free port; returns its address."""
        port = free_port()
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    str(REPOSITORY / "examples" / "rollout_servers.sh"),
                    str(self.config),
                    f"run_dir={self.directory / name}",
                    f"rollout.server.port={port}",
                    "rollout.server.count=1",
                ],
                cwd=REPOSITORY,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        address = f"http://127.0.0.1:{port}"
        self.servers[address] = process
        return address

    def list_servers(self, addresses: list[str]) -> None:
        """Write the servers file."""
        atomic_write_text(self.directory / "servers.txt", "".join(f"{a}\n" for a in addresses))

    def start_job(self, *overrides: str) -> None:
        """Start the trainer, which goes on where it was."""
        self.starts += 1
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self.job = subprocess.Popen(
                [str(REPOSITORY / "examples" / "single_node.sh"), str(self.config), *overrides],
                cwd=REPOSITORY,
                env=self.environment | {"NPROC": "2"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, share: float) -> None:
        """Let the run go on until this share of the time is over."""
        while self.elapsed_s < share * self.minutes * 60:
            self.assert_running()
            time.sleep(1)

    def wait_for(self, is_so: Callable[[], bool], what: str, timeout_s: float = 900) -> float:
        """Wait for something to happen in a run that goes on; returns how long it took."""
        began_s = time.monotonic()
        while not is_so():
            self.assert_running()
            assert time.monotonic() - began_s < timeout_s, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.2)
        return time.monotonic() - began_s

    def assert_running(self) -> None:
        """The job ends only when it is told to."""
        assert self.job is not None
        assert self.job.poll() is None, f"the job ended: {self.last_line()}"

    @property
    def elapsed_s(self) -> float:
        """Since the first job was started."""
        return time.monotonic() - self.started_s

    def last_line(self) -> str:
        """What the job said last; torchrun's report of a rank that was killed comes after it."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        own = [
            line
            for line in lines
            if line.startswith("stopped by")
            or ("bapo-megatron:" in line and "another rank" not in line)
        ]
        others = [line for line in lines if "another rank" in line]
        line = (own or others or lines or [""])[-1]
        return line.replace(f"{self.run_dir.parent}/", "")

    def do(self, share: float, what: str, act: Callable[[], object], *, ends: bool = False) -> None:
        """Do something to the run at this share of the time; wait for its next step.

        A job that ``ends`` by it is started again.
        """
        self.wait_until(share)
        at_s, code, line, before = self.elapsed_s, None, "", len(steps(self.run_dir))
        act()
        if ends:
            assert self.job is not None
            code, line = self.job.wait(600), self.last_line()
            self.start_job()
            before = len(steps(self.run_dir))
        waited_s = self.wait_for(lambda: len(steps(self.run_dir)) > before, "a step")
        self.events.append(Event(at_s, what, before, waited_s, code, line))
        print(self.events[-1], file=sys.stderr, flush=True)  # noqa: T201

    def engine_group(self, address: str) -> int:
        """The process group of the server itself, which its supervisor started."""
        for child in psutil.Process(self.servers[address].pid).children(recursive=True):
            if "engine.sglang.launcher" in " ".join(child.cmdline()):
                return os.getpgid(child.pid)
        raise AssertionError(f"{address} does not run")

    def end_job(self, number: signal.Signals) -> None:
        """Signal the job as Slurm does: the launcher, which passes it on to the ranks."""
        assert self.job is not None
        os.killpg(self.job.pid, number)

    def rank_zero(self) -> psutil.Process:
        """The process of rank 0."""
        assert self.job is not None
        for child in psutil.Process(self.job.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == "0" and "train" in child.cmdline():
                    return child
        raise AssertionError("no rank 0")


def freeze(soak: Soak, address: str) -> None:
    """Stop a server's processes until somebody ends them."""
    os.killpg(soak.engine_group(address), signal.SIGSTOP)


def end_for_good(soak: Soak, address: str) -> None:
    """Kill what watches a server and would start it again; the server ends with its owner."""
    group = soak.engine_group(address)
    supervisor = soak.servers.pop(address)
    os.killpg(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    soak.wait_for(lambda: not is_alive(group), "the end of the server without an owner", 60)


def is_alive(group: int) -> bool:
    """Whether a process group has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run_soak(soak: Soak) -> None:
    """Let the run go to its end through everything."""
    first, second = (soak.start_server(f"server{number}") for number in (1, 2))
    soak.list_servers([first, second])
    soak.start_job()
    soak.wait_for(lambda: len(steps(soak.run_dir)) >= 2, "the first steps")

    third = ""

    def add_third() -> None:
        nonlocal third
        third = soak.start_server("server3")
        soak.list_servers([first, second, third])

    def stop_job() -> None:
        soak.end_job(signal.SIGTERM)

    soak.do(0.10, "a server of two freezes", lambda: freeze(soak, first))
    soak.do(0.22, "a third server is added", add_third)
    soak.do(0.32, "TERM", stop_job, ends=True)
    soak.do(0.42, "a server ends for good", lambda: end_for_good(soak, second))
    soak.do(0.52, "the first server freezes again", lambda: freeze(soak, first))
    soak.do(0.64, "kill -9 of rank 0", lambda: soak.rank_zero().kill(), ends=True)
    soak.do(0.76, "the disk is full", lambda: fill_until_the_end(soak), ends=True)
    soak.do(0.88, "TERM", stop_job, ends=True)

    soak.wait_until(1.0)
    stop_job()
    assert soak.job is not None
    soak.job.wait(600)  # torchrun's status after TERM is 1
    assert (soak.run_dir / "stopped").exists(), soak.last_line()
    soak.start_job(f"train.steps={len(steps(soak.run_dir)) + LAST_STEPS}")
    assert soak.job.wait(900) == 0, soak.last_line()


def fill_until_the_end(soak: Soak) -> None:
    """Leave no byte on the disk until the job has ended."""
    ballast = soak.run_dir.parent / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    assert soak.job is not None
    soak.job.wait(600)
    ballast.unlink()


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system that can be filled; takes root."""
    directory.mkdir()
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "soak", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def survivors() -> list[list[str]]:
    """Command lines of the processes of the run that still live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if MARK in process.environ() and process.pid != os.getpid():
                found.append(process.cmdline())
    return found


def unused_shared_memory() -> set[Path]:
    """What is under /dev/shm, but in no living process."""
    used = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            used |= {Path(part.path) for part in process.memory_maps()}
    return {path for path in Path("/dev/shm").iterdir() if path not in used}


def report(soak: Soak, account: dict[str, int], where: dict[str, Any]) -> str:
    """The markdown of a finished run."""
    rows = steps(soak.run_dir)
    num_lost = sum(row["rollout/lost_requests"] for row in rows)
    lines = [
        "# What a week on a cluster brings, in minutes",
        "",
        *harness.heading(where),
        f"Two ranks and up to three SGLang servers: {len(rows)} steps in "
        f"{soak.elapsed_s / 60:.0f} minutes, {soak.starts} starts of the job.",
        "",
        "| minute | what | after step | next step | exit status | last line of the job |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {event.at_s / 60:.0f} | {event.what} | {event.step} | after {event.next_step_s:.0f} s "
        f"| {'' if event.exit_code is None else event.exit_code} | {event.last_line} |"
        for event in soak.events
    ]
    lines += [
        "",
        f"The run ended by itself. {num_lost:.0f} requests were continued on another server. "
        f"Groups: {account['drawn']} drawn = {account['trained']} trained + {account['dropped']} "
        f"dropped + {account['waiting']} in the buffer; none twice; versions never decrease within "
        "a response. No process was left, and nothing in /dev/shm.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    options = parser.parse_args()
    where = harness.machine(torch.device("cpu"))
    end_by_exception()
    memory_before = unused_shared_memory()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        stack.enter_context(small_disk(directory / "disk"))
        config = write_soak_config(directory)
        soak = Soak(
            directory,
            config,
            options.minutes,
            os.environ
            | KEYS
            | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", MARK: "1"}
            | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        )
        stack.callback(end_everything, soak)
        try:
            run_soak(soak)
            text = report(soak, assert_balanced(soak.run_dir), where)
        except BaseException:
            sys.stderr.write(soak.log.read_text(errors="replace")[-20_000:])
            raise
        events = [asdict(event) for event in soak.events]
        options.out.with_suffix(".json").write_text(json.dumps(events, indent=2) + "\n")
    left, memory = survivors(), unused_shared_memory() - memory_before
    assert not left, left
    assert not memory, memory
    options.out.with_suffix(".md").write_text(text)


def write_soak_config(directory: Path) -> Path:
    """The run of the chaos tests, on two ranks, with servers from a file and a small disk."""
    path = write_config(directory, make_random_model(directory / "model"))
    settings = yaml.safe_load(path.read_text())
    settings["run_dir"] = str(directory / "disk" / "run")
    settings["parallel"] = {"tensor": 2}
    settings["rollout"] |= {
        "servers_file": str(directory / "servers.txt"),
        "min_servers": 1,
    }
    settings["train"]["steps"] = 1_000_000
    settings["checkpoint"] = {"every_steps": 10, "keep_last": 2}
    path.write_text(yaml.safe_dump(settings))
    return path


def end_everything(soak: Soak) -> None:
    """End servers and job, whatever happened."""
    for process in (soak.job, *soak.servers.values()):
        if process is not None and process.poll() is None:
            process.terminate()
    for process in (soak.job, *soak.servers.values()):
        if process is not None:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
