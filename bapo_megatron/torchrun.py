"""torchrun with a rendezvous store bound to one address: ``python -m bapo_megatron.torchrun …``.

torchrun's own stores listen on all interfaces without a key: whoever reaches the dynamic one runs
code here, by pickles, and the static one can redirect the ranks. This rendezvous is static, and its
store listens on the loopback for a single node, else on ``--master-addr``. Logs are in a private
directory. Below torchrun's report, the last line says what ended the run and how to continue.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import api as processes_of_torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from bapo_megatron.config.section import is_loopback
from bapo_megatron.runtime.processes import (
    RUN_DIR_FILE,
    PrivateDirectory,
    describe_exit,
    environment_set,
    unfinished_ranks,
)
from bapo_megatron.trainer.stopping import SAME_SIGNAL_S, STOPPED_NAME

_BACKEND = "bapo-megatron"
_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_DEFAULTS = {
    "PET_SHUTDOWN_TIMEOUT": "1800",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
"""torchrun's variables where the environment has none: ranks that a signal stops have half an hour
to save, and SIGUSR1 is such a signal."""
_AGAIN = "; start all nodes of the run again"
_END_S = 30
"""Ranks that a second Ctrl-C ends have as long as torchrun would give them."""
_MEETING_S = 600
"""Time limit for all nodes to come, as in torchrun's static rendezvous."""


class BoundRendezvous(StaticTCPRendezvous):
    """A static rendezvous at a store that listens on one address of the first node."""

    def __init__(self, address: str, port: int, rank: int, num_nodes: int, run_id: str) -> None:
        """Open the store where ``rank`` is 0; a ``port`` of 0 is a free one.

        Raises:
            ValueError: ``address`` cannot be listened on, or other nodes do not reach it.
        """
        listener = _listen(address, port, num_nodes) if rank == 0 else None
        if listener is not None:
            port = listener.getsockname()[1]
        super().__init__(address, port, rank, num_nodes, run_id, _MEETING_S)
        # Otherwise it would open one on all interfaces.
        self._store = TCPStore(
            address,
            port,
            num_nodes,
            is_master=rank == 0,
            timeout=self.timeout,
            master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
        )

    def get_backend(self) -> str:
        """Return the name by which torchrun knows it."""
        return _BACKEND


def _listen(address: str, port: int, num_nodes: int) -> socket.socket:
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if num_nodes > 1 and is_loopback(str(place[0])):
            raise ValueError(
                f"--master-addr: {address} is {place[0]} on this node, which no other reaches; "
                "give the address of the interface between the nodes"
            )
        return socket.create_server(place[:2], family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"--master-addr, --master-port: cannot listen on {address}:{port} ({error.strerror}); "
            "give an address of the node with --node-rank 0 itself, and a free port"
        ) from error


def _make_rendezvous(params: RendezvousParameters) -> BoundRendezvous:
    address, _, port = params.endpoint.rpartition(":")
    rank = params.get_as_int("rank")
    assert rank is not None, "main gives it"
    return BoundRendezvous(address, int(port), rank, params.max_nodes, params.run_id)


def _bind(args: argparse.Namespace) -> None:
    min_nodes, num_nodes = parse_min_max_nnodes(args.nnodes)
    if min_nodes != num_nodes or args.standalone or args.rdzv_backend != "static":
        raise ValueError(
            "--nnodes, --rdzv-backend, --standalone: the rendezvous is static; give one number of "
            "nodes, and for several of them --node-rank, --master-addr and --master-port"
        )
    address, port = _LOOPBACK, args.master_port or 0
    if num_nodes > 1:
        address, port = args.master_addr, args.master_port or _DEFAULT_PORT
    args.rdzv_backend, args.rdzv_endpoint = _BACKEND, f"{address}:{port}"
    args.rdzv_conf = f"rank={args.node_rank}"


def _stop_once(number: int, frame: FrameType | None) -> NoReturn:
    """Do what torchrun's handler does, but once: a second time, it leaves ranks that save.

    Only after Ctrl-C, a later one ends the ranks: torchrun, in whose wait for them the exception is
    raised, then sends SIGTERM. Those that have not ended in time are killed with this process.
    """
    for other in signal.valid_signals():
        if signal.getsignal(other) is _stop_once:
            signal.signal(other, signal.SIG_IGN)
    counted_s = time.monotonic()

    def stop_again(number: int, frame: FrameType | None) -> None:
        nonlocal counted_s
        if (now_s := time.monotonic()) - counted_s > SAME_SIGNAL_S:
            counted_s = now_s
            signal.alarm(_END_S)
            raise SignalException("got SIGINT again", signal.SIGINT)

    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, stop_again)
        signal.signal(signal.SIGALRM, stop_again)
    raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))


def main() -> None:
    """Run torchrun with the arguments of this process."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    args = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    # Until there are ranks, torchrun handles no signal, and while the store waits for other nodes,
    # in C++, Python would not handle Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    processes_of_torchrun._terminate_process_handler = _stop_once  # type: ignore[assignment]
    rendezvous_handler_registry.register(_BACKEND, _make_rendezvous)
    logs = PrivateDirectory()
    noted = logs.path / "run_dir"
    try:
        _bind(args)
        args.log_dir = args.log_dir or str(logs.path)
        with environment_set(RUN_DIR_FILE, str(noted)):
            run(args)  # type: ignore[no-untyped-call]
        if early := unfinished_ranks(noted):
            sys.exit(f"bapo-megatron: {_describe_early(early[0], noted)}")
    except ChildFailedError as failed:
        # torchrun's report; its traceback would only hide it
        sys.exit(f"{failed}\nbapo-megatron: {_describe_failure(failed, noted)}")
    except SignalException as error:
        sys.exit(f"bapo-megatron: {_describe_stop(error, noted)}")
    except ValueError as error:
        sys.exit(f"bapo_megatron.torchrun: {error}")
    finally:
        logs.close()


def _describe_failure(failed: ChildFailedError, noted: Path) -> str:
    """Why the ranks failed: by the first of those that said it, else by the one that ended first.

    ``noted`` is where rank 0, if it is on this node, has written its run directory.
    """
    for rank, failure in sorted(failed.failures.items()):
        said: Any = failure.message  # a record by ``cli``, or torchrun's own text
        if isinstance(said, dict):
            place = f"rank {rank}: " if rank else ""
            first_line = said["message"].splitlines()[0].removesuffix(":")
            has_remedy = said.get("extraInfo", {}).get("has_remedy", False)
            return f"{place}{first_line}{'' if has_remedy else _way_on(noted)}"
    if early := [rank for rank in unfinished_ranks(noted) if rank not in failed.failures]:
        return _describe_early(early[0], noted)
    # torchrun ends the others by SIGTERM, and half a minute later by SIGKILL. Those that lost a
    # peer have an exit status, and a signal's code is negative.
    rank, first = min(
        failed.failures.items(),
        key=lambda of: (of[1].exitcode == -signal.SIGTERM, of[1].timestamp, of[1].exitcode),
    )
    return f"rank {rank} ended by {describe_exit(first.exitcode)}{_way_on(noted) or _AGAIN}"


def _describe_early(rank: int, noted: Path) -> str:
    return (
        f"rank {rank} ended with exit status 0 before it was done: user or library code calls exit "
        f"in C, or exec; remove that call{_way_on(noted)}"
    )


def _describe_stop(error: SignalException, noted: Path) -> str:
    """How the run stopped: rank 0 writes a file once all is saved."""
    is_saved = noted.exists() and (Path(noted.read_text()) / STOPPED_NAME).exists()
    how = "stopped" if is_saved else "ended"
    return f"{how} by {signal.Signals(error.sigval).name}{_way_on(noted) or _AGAIN}"


def _way_on(noted: Path) -> str:
    from bapo_megatron.trainer.opening import how_to_continue  # takes a moment to import

    return how_to_continue(Path(noted.read_text())) if noted.exists() else ""


if __name__ == "__main__":
    main()
