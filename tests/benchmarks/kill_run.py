"""One run of a kill campaign: its processes, and the ways to strike each of them."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.kill_account import Account, Shape, audit, different_files
from tests.launch import REPOSITORY, free_port
from tests.trainer.chaos import steps
from tests.trainer.dumps import make_random_model
from tests.trainer.runs import write_run

MARK = "BAPO_MEGATRON_KILL_CAMPAIGN"
"""Environment variable that every process of the campaign inherits."""
KEYS = {"BAPO_MEGATRON_ADMIN_API_KEY": "kill-admin" * 2, "BAPO_MEGATRON_API_KEY": "kill" * 4}
DISK_BYTES = 400 << 20
GROUPS_PER_STEP = 4
LAST_STEPS = 3
"""Steps that are left after the last fault."""
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}
_WORDS = {
    "torchrun": "bapo_megatron.torchrun",
    "rank": "bapo_megatron train",
    "collector": "bapo_megatron.rollout.collector",
    "grader": "bapo_megatron.runtime.worker",
    "owner": "bapo_megatron serve",
    "server": "bapo_megatron.engine.sglang.launcher",
}
"""What the command line of a victim has after ``-m``."""
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch sets it here, where the commands would take it for the user's."""
_MAX_DELAY_S = 6.0
_SECOND_SIGNAL_S = 1.0
_LIMIT_S = 1800.0
_GONE_S = 120.0


@dataclass(frozen=True, slots=True)
class Kind:
    how: str
    """Key of ``_SIGNALS``, or ``fill``."""
    victim: str
    """Key of ``_WORDS``, or ``disk``."""
    moment: str = ""
    """``sync`` (of weights) or ``save``: while one is under way; else at any moment."""
    times: int = 1
    """Signals, a second apart."""

    @property
    def name(self) -> str:
        """Such as ``kill-rank-sync``."""
        parts = (self.how, self.victim, self.moment, "" if self.times == 1 else "thrice")
        return "-".join(filter(None, parts))

    @property
    def ends_job(self) -> bool:
        """Whether the job has to be started again."""
        return self.victim in ("rank", "torchrun", "collector", "disk")


KINDS = (
    *(Kind("kill", "rank", moment) for moment in ("", "sync", "save")),
    *(Kind("term", "rank"), Kind("kill", "torchrun"), Kind("term", "torchrun")),
    *(Kind("term", "torchrun", "save"), Kind("term", "torchrun", times=3)),
    *(Kind("kill", "collector"), Kind("kill", "grader")),
    *(Kind(how, "server", moment) for how in ("kill", "freeze") for moment in ("", "sync")),
    *(Kind("term", "server"), Kind("kill", "owner"), Kind("fill", "disk")),
)


COLUMNS = {
    "minute": "{minute:.0f}",
    "fault": "{name}",
    "after step": "{step}",
    "back after": "{back_s:.0f} s",
    "exit status": "{exit_code}",
    "last line of the job": "{last_line}",
}
"""Of a fault; the run is back when it has made two steps more, with both servers."""


@dataclass(slots=True)
class KilledRun:
    """One run, its processes, and what was done to them."""

    directory: Path
    method: str
    """``rollout.weight_sync.method``."""
    is_served: bool
    """The servers are those of examples/rollout_servers.sh."""
    chance: random.Random
    config: Path = field(init=False)
    port: int = field(default_factory=free_port)
    """Of the first of the served servers."""
    job: subprocess.Popen[bytes] | None = None
    owner: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    """Where the log of the last start begins, in bytes."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """By the fields of ``COLUMNS``."""
    started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Write the model and the configuration, and make the disk."""
        disk = self.directory / "disk"
        disk.mkdir(parents=True)
        mount(disk, f"size={DISK_BYTES}")
        addresses = [f"http://127.0.0.1:{self.port + number}" for number in range(2)]
        # Limits are far above what a busy machine takes: nothing but the faults may end anything.
        health = {"interval_s": 0.5, "timeout_s": 10, "stuck_timeout_s": 40}
        self.config = write_run(
            self.directory,
            make_random_model(self.directory / "model"),
            run_dir=str(self.run_dir),
            parallel={"tensor": 2},
            reward={"workers": 2},
            rollout={
                "max_response_tokens": 160,
                "temperature": 1.0,
                "oversample_groups": 2,
                "async_steps": 1,
                "stream_tokens": 8,
                "weight_sync": {"method": self.method, "timeout_s": 60},
                "min_servers": 1,
                "server": {
                    "count": 2,
                    "max_total_tokens": 8192,
                    "mem_fraction": 0.2,
                    "start_timeout_s": _LIMIT_S,
                },
                "health": {**health, "patience_s": 2 * _LIMIT_S},
                **({"servers": addresses} if self.is_served else {}),
            },
            algorithm={"updates_per_batch": 2},
            train={"steps": 1_000_000},
            checkpoint={"every_steps": 3},
            eval={"sets": []},
        )

    @property
    def run_dir(self) -> Path:
        """On a disk of its own, which can be filled."""
        return self.directory / "disk" / "run"

    @property
    def job_log(self) -> Path:
        """Everything that the jobs say, one after the other."""
        return self.directory / "job.log"

    @property
    def num_steps(self) -> int:
        return int(max((row["step"] for row in steps(self.run_dir)), default=0))

    @property
    def num_returns(self) -> int:
        """How often a server has come back."""
        log = self.run_dir / "logs" / "collector.log"
        return log.read_text().count("needs weights") if log.exists() else 0

    def start_owner(self) -> None:
        serve = [str(REPOSITORY / "examples" / "rollout_servers.sh"), str(self.config)]
        serve += [f"run_dir={self.directory / 'servers'}", "rollout.servers=[]"]
        serve += [f"rollout.server.port={self.port}"]
        self.owner = self._start(serve, self.directory / "servers.log")

    def start_job(self, *overrides: str) -> None:
        """Start the trainer, which goes on where it was."""
        self.log_start = self.job_log.stat().st_size if self.job_log.exists() else 0
        train = [str(REPOSITORY / "examples" / "single_node.sh"), str(self.config), *overrides]
        self.job = self._start(train, self.job_log)

    def _start(self, command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={k: v for k, v in os.environ.items() if k != _COMPILER_CACHE}
                | KEYS
                | {"PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
                | {"NO_COLOR": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, is_so: Callable[[], bool], what: str, poll_s: float = 0.5) -> None:
        """Wait for something to happen in a run that goes on."""
        assert self.job is not None
        deadline_s = time.monotonic() + _LIMIT_S
        while not is_so():
            assert self.job.poll() is None, f"{what}: the job ended: {self.last_line()}"
            assert self.owner is None or self.owner.poll() is None, f"{what}: the owner ended"
            assert time.monotonic() < deadline_s, f"{what}: not within {_LIMIT_S:g} s"
            time.sleep(poll_s)

    def end_job(self) -> int:
        """Wait until the job and all that it started have ended; returns its exit status."""
        assert self.job is not None
        code = self.job.wait(_LIMIT_S)
        deadline_s = time.monotonic() + _GONE_S
        while alive := [process for process in processes() if not self._is_served(process)]:
            assert time.monotonic() < deadline_s, f"left: {[p.cmdline() for p in alive]}"
            time.sleep(0.2)
        return code

    def _is_served(self, process: psutil.Process) -> bool:
        """Whether it belongs to servers that outlive the job.

        So does torch's keeper of shared memory, once they have read tensors from it.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            pids = {process.pid, *(parent.pid for parent in process.parents())}
            is_keeper = process.name() == "torch_shm_manager"
            return self.owner is not None and (is_keeper or self.owner.pid in pids)
        return False

    def last_line(self) -> str:
        """What the job said last; torchrun's report of a rank that was killed comes after it."""
        lines = self.job_log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        ends = [line for line in lines if "bapo-megatron: " in line or "stopped by" in line]
        causes = [line for line in ends if "another rank" not in line]
        return (causes or ends or lines or [""])[-1].replace(f"{self.run_dir.parent}/", "")

    def strike(self, kind: Kind) -> None:
        """Let something fail at its moment, and wait until the run has got over it."""
        time.sleep(self.chance.uniform(0, _MAX_DELAY_S))
        before, returns = self.num_steps, self.num_returns
        victim = None if kind.how == "fill" else self.chance.choice(find(kind.victim))
        if kind.moment == "sync":
            self._wait_for_sync()
        elif kind.moment == "save":
            unfinished = self.run_dir / "checkpoints"
            self.wait_for(lambda: any(unfinished.glob(".step_*.tmp")), "a save", poll_s=0.002)
        struck_s = time.monotonic()
        if victim is None:
            self._fill_disk()
        else:
            send(kind, victim)
        code, line = "", ""
        if kind.ends_job:
            code = self.end_job()
            line = self.last_line()
            assert (self.run_dir / "stopped").exists() == (kind.how == "term"), line
            assert code != 0 or kind.how == "term", line
            self.start_job()
        elif kind.victim == "owner":
            assert self.owner is not None
            self.owner.wait(_LIMIT_S)
            self.owner = None
            self.wait_for(lambda: not find("server"), "the end of servers without an owner")
            self.start_owner()
        if kind.victim in ("server", "owner"):
            self.wait_for(lambda: self.num_returns > returns, "the server's return")
        target = self.num_steps + 2
        self.wait_for(lambda: self.num_steps >= target, "two steps more")
        back_s, minute = time.monotonic() - struck_s, (struck_s - self.started_s) / 60
        fault = {"minute": minute, "name": kind.name, "step": before, "back_s": back_s}
        self.faults.append(fault | {"exit_code": code, "last_line": line})
        print(self.faults[-1], file=sys.stderr, flush=True)  # noqa: T201

    def _wait_for_sync(self) -> None:
        """Ask rank 0 for its stacks (docs/runtime.md) until it is in a weight sync."""
        stacks = self.run_dir / "logs" / "stacks_rank_0.txt"
        first = next(rank for rank in find("rank") if rank.environ()["RANK"] == "0")

        def syncs() -> bool:
            size = stacks.stat().st_size
            first.send_signal(signal.SIGUSR2)
            time.sleep(0.02)
            with stacks.open() as file:
                file.seek(size)
                return "weight_sync/send.py" in file.read()

        self.wait_for(syncs, "a weight sync", poll_s=0.01)

    def _fill_disk(self) -> None:
        """Leave no byte on the disk until the job has ended."""
        assert self.job is not None
        ballast = self.run_dir.parent / "ballast"
        with ballast.open("wb", buffering=0) as file:
            while self.job.poll() is None:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(1 << 12))
                time.sleep(0.05)
        ballast.unlink()

    def finish(self, order: Sequence[Kind]) -> Account:
        """Let the run go to its end through all faults; return what became of its groups."""
        if self.is_served:
            self.start_owner()
        self.start_job()
        self.wait_for(lambda: self.num_steps >= 2, "the first steps")
        for kind in order:
            self.strike(kind)
        os.kill(find("torchrun")[0].pid, signal.SIGTERM)
        self.end_job()
        assert (self.run_dir / "stopped").exists(), self.last_line()
        num_steps = self.num_steps + LAST_STEPS
        self.start_job(f"train.steps={num_steps}")
        assert self.end_job() == 0, self.last_line()
        if self.owner is not None:
            self.owner.terminate()
            self.owner.wait(_LIMIT_S)
            self.owner = None
        num_prompts = len((self.directory / "train.jsonl").read_text().splitlines())
        account = audit(self.run_dir, Shape(GROUPS_PER_STEP, 4, num_prompts))
        again = self.directory / "replay"
        self.start_job(
            f"run_dir={again}",
            f"replay={self.run_dir / 'rollouts'}",
            f"train.steps={num_steps}",
            "checkpoint.every_steps=0",
        )
        assert self.end_job() == 0, self.last_line()
        for name in different_files(self.run_dir / "hf", again / "hf"):
            account.problems.append(f"{name}: not that of an undisturbed replay")
        return account

    def close(self) -> None:
        """End what a run that failed has left."""
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def processes() -> list[psutil.Process]:
    """All processes of the campaign but this one."""
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and MARK in process.environ():
                marked.append(process)
    return marked


def send(kind: Kind, victim: psutil.Process) -> None:
    """Send the signals; to a server as to all of its processes."""
    kill = os.killpg if kind.victim == "server" else os.kill
    for number in range(kind.times):
        time.sleep(_SECOND_SIGNAL_S if number else 0)
        with contextlib.suppress(ProcessLookupError):
            kill(victim.pid, _SIGNALS[kind.how])


def find(victim: str) -> list[psutil.Process]:
    """The processes of one of ``_WORDS``; of a group only its leader."""
    words, victims = _WORDS[victim].split(), []
    for process in processes():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            line = process.cmdline()
            place = line.index("-m") + 1 if "-m" in line else 0
            if line[place : place + len(words)] == words and os.getpgid(process.pid) == process.pid:
                victims.append(process)
    return victims


def mount(directory: Path, options: str) -> None:
    """Put a file system in memory there; it goes with the last process that sees it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "campaign", directory], check=True)
