"""Runs a function on several gloo ranks, each a new process, and brings back what they return."""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.runtime.distributed import ProcessGroups, init_distributed, shutdown_distributed
from bapo_megatron.runtime.processes import environment_set

MAX_LAYOUTS = 16
"""Process groups that one set of ranks can join, one after the other."""

# Ranks are forks of a process that has imported Megatron and has done nothing else.
_CONTEXT: BaseContext = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 240
) -> list[Any]:
    """Call ``function(*args)`` on every rank; returns the results in rank order.

    The function lives in a module. It joins process groups by ``joined``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        exit_codes = run_to_exit(
            function, num_ranks, *args, timeout_s=timeout_s, scratch=Path(scratch)
        )
        errors = [path.read_text() for path in sorted(Path(scratch).glob("error_*"))]
        assert not any(exit_codes), f"exit codes {exit_codes}\n" + "\n".join(errors)
        return [
            torch.load(Path(scratch) / f"result_{rank}", weights_only=False)
            for rank in range(num_ranks)
        ]


def run_to_exit(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    scratch: Path,
    timeout_s: float = 240,
) -> list[int | None]:
    """Like ``run_ranks``, but returns the exit codes; a rank that dies takes the others with it."""
    # As torchrun's agent does, hold the stores here, one per layout: their ports are ours from the
    # start, and no layout sees the keys of an earlier one.
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(MAX_LAYOUTS)
    ]
    ports = [store.port for store in stores]
    ranks = [
        start_fork(_rank_main, function, rank, num_ranks, ports, scratch, args)
        for rank in range(num_ranks)
    ]
    wait_for_ranks(ranks, timeout_s, stop=_kill_soon, kill=BaseProcess.kill)
    return [process.exitcode for process in ranks]


def start_fork(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that calls ``function``, which lives in a module, with Megatron imported."""
    process = _CONTEXT.Process(target=function, args=args)
    # Read when the server of forks imports torch, before a main function could set them.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with (
        environment_set("OMP_NUM_THREADS", threads),
        environment_set("CUDA_VISIBLE_DEVICES", ""),
    ):
        process.start()
    return process


def forks_of_this_process() -> None:
    """Let forks come from this process, which is one itself: it has no server of forks."""
    global _CONTEXT
    _CONTEXT = multiprocessing.get_context("fork")


def forget_signal_handlers() -> None:
    """Handle signals as a new process does, not as the one that this is a fork of."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """What torchrun tells a rank, but for the port of the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def wait_for_ranks(
    ranks: list[BaseProcess],
    timeout_s: float,
    *,
    stop: Callable[[BaseProcess], None],
    kill: Callable[[BaseProcess], None],
) -> bool:
    """Wait until all ranks have ended; ``stop`` ends the others of one that fails.

    Returns:
        Whether they ended in time; ``kill`` ends those that did not.
    """
    deadline_s = time.monotonic() + timeout_s
    while running := [rank for rank in ranks if rank.is_alive()]:
        if time.monotonic() > deadline_s:
            for rank in running:
                kill(rank)
            for rank in running:
                rank.join()
            return False
        if any(rank.exitcode for rank in ranks):
            for rank in running:
                stop(rank)
        running[0].join(0.1)
    return True


def take_port() -> None:
    """Let the next process groups meet at a store of their own."""
    os.environ["MASTER_PORT"], _, os.environ["TEST_PORTS"] = os.environ["TEST_PORTS"].partition(",")


@contextmanager
def joined(tensor: int = 1, sequence: bool = False, **sizes: int) -> Iterator[ProcessGroups]:
    """Process groups of one layout over all ranks; left at the end of the block.

    ``sizes``: further sizes of ``ParallelConfig``.
    """
    take_port()
    parallel = ParallelConfig.model_validate(
        {"tensor": tensor, "sequence": sequence, "timeout_s": 60.0, **sizes}
    )
    groups = init_distributed(parallel)
    try:
        yield groups
    finally:
        shutdown_distributed()


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    ports: list[int],
    scratch: Path,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        rank_environment(rank, num_ranks),
        TEST_PORTS=",".join(map(str, ports)),
    )
    try:
        from bapo_megatron.policy import cpu_compat
        from bapo_megatron.policy.megatron_import import import_megatron

        import_megatron()
        cpu_compat.install()
        torch.save(function(*args), scratch / f"result_{rank}")
    except BaseException:
        (scratch / f"error_{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def _kill_soon(rank: BaseProcess) -> None:
    rank.join(0.5)  # it may be about to report an error as well
    rank.kill()
