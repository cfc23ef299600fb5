"""Starts processes that train batches in turns (``turns.py``), and gives them their turns."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.benchmarks.harness import REPOSITORY
from tests.launch import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TURN_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Contender:
    """One trainer with its settings."""

    name: str
    module: str
    python: str
    ranks: int
    threads: int
    spec: dict[str, Any]


class Running:
    """The processes of a contender."""

    def __init__(self, contender: Contender, scratch: Path) -> None:
        """Start them; they load their model and then wait."""
        self.contender = contender
        self._logs = [scratch / f"rank_{rank}.log" for rank in range(contender.ranks)]
        scratch.mkdir()
        port = free_port()
        self._processes = [
            self._start(rank, scratch, log, port) for rank, log in enumerate(self._logs)
        ]

    def _start(self, rank: int, scratch: Path, log: Path, port: int) -> subprocess.Popen[str]:
        contender = self.contender
        changes: dict[str, Any] = {"scratch": str(scratch), "overrides": [f"run_dir={scratch}/run"]}
        variables = {
            "OMP_NUM_THREADS": str(contender.threads),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(REPOSITORY),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        if contender.ranks > 1 or contender.module == "replay_ranks":
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(contender.ranks),
                "LOCAL_WORLD_SIZE": str(contender.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        with log.open("w") as errors:
            return subprocess.Popen(
                [
                    contender.python,
                    "-m",
                    f"tests.benchmarks.{contender.module}",
                    json.dumps(contender.spec | changes),
                ],
                cwd=scratch,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait(self) -> list[dict[str, Any]]:
        """Replies of all ranks: ready, or what the turn measured.

        Raises:
            RuntimeError: A rank has ended or does not answer in time.
        """
        replies = []
        for process, log in zip(self._processes, self._logs, strict=True):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], TURN_TIMEOUT_S)
            line = process.stdout.readline() if ready else ""
            if not line:
                what = "ended" if ready else f"did not answer in {TURN_TIMEOUT_S:g} s"
                tail = log.read_text()[-3000:]
                raise RuntimeError(f"{self.contender.name}: a rank {what}; its output ends\n{tail}")
            replies.append(json.loads(line))
        return replies

    def turn(self) -> list[dict[str, Any]]:
        """Train one batch."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """End them; what they are in the middle of is of no use."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


def take_turns(
    contenders: Sequence[Contender], scratch: Path, *, warmup: int, rounds: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """Let contenders train ``warmup + rounds`` batches in turns.

    Returns:
        By contender and batch, what every rank replied.
    """
    order = random.Random(0)
    replies: dict[str, list[list[dict[str, Any]]]] = {
        contender.name: [] for contender in contenders
    }
    with contextlib.ExitStack() as stack:
        running = []
        for number, contender in enumerate(contenders):
            running.append(Running(contender, scratch / str(number)))
            stack.callback(running[-1].close)
        for processes in running:
            processes.wait()
        for _ in range(warmup + rounds):
            for processes in order.sample(running, len(running)):
                replies[processes.contender.name].append(processes.turn())
    return replies
