"""torchrun with a rendezvous store bound to one address: ``python -m bapo_megatron.torchrun …``.

torchrun's own stores listen on all interfaces without a key: whoever reaches the dynamic one can
run code here through its pickles, or redirect the ranks with the static one. This rendezvous is
static; its store listens on the loopback for a single node, else on ``--master-addr``. Logs are in
a private directory. The last line, below torchrun's report, says why the run ended and how to
continue.
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
from torch.distributed.elastic.multiprocessing import api as torchrun_processes
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
)
from bapo_megatron.trainer.stopping import SAME_SIGNAL_S, STOPPED_NAME

_BACKEND = "bapo-megatron"
_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_DEFAULTS = {
    "PET_SHUTDOWN_TIMEOUT": "1800",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
"""Defaults of torchrun's variables: ranks get half an hour to save after a signal, also SIGUSR1."""
_AGAIN = "; start all nodes of the run again"
_END_S = 30
"""Time for ranks to exit after a second Ctrl-C, as torchrun's default."""
_RENDEZVOUS_TIMEOUT_S = 600
"""Time limit for all nodes to join, as in torchrun's static rendezvous."""


class BoundRendezvous(StaticTCPRendezvous):
    """A static rendezvous whose store listens on one address of the first node."""

    def __init__(self, address: str, port: int, rank: int, num_nodes: int, run_id: str) -> None:
        """Open the store on rank 0; port 0 picks a free one.

        Raises:
            ValueError: Rank 0 cannot listen on ``address``, or other nodes cannot reach it.
        """
        listener = _listen(address, port, num_nodes) if rank == 0 else None
        if listener is not None:
            port = listener.getsockname()[1]
        super().__init__(address, port, rank, num_nodes, run_id, _RENDEZVOUS_TIMEOUT_S)
        # torchrun would open one on all interfaces.
        self._store = TCPStore(
            address,
            port,
            num_nodes,
            is_master=rank == 0,
            timeout=self.timeout,
            master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
        )

    def get_backend(self) -> str:
        """Return the name under which torchrun knows it."""
        return _BACKEND


def _listen(address: str, port: int, num_nodes: int) -> socket.socket:
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if num_nodes > 1 and is_loopback(str(place[0])):
            raise ValueError(
                f"--master-addr: {address} is {place[0]} on this node, which others cannot reach; "
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
    assert rank is not None, "set by _bind"
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
    """Do what torchrun's handler does, but once: on a second signal it abandons ranks that save.

    Only a second Ctrl-C ends the ranks: its exception interrupts torchrun's wait for them, and
    torchrun sends SIGTERM. Ranks that do not exit in time are killed with this process.
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
    # torchrun handles no signal before it starts ranks, nor does Python handle Ctrl-C while the
    # store waits for other nodes, in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torchrun_processes._terminate_process_handler = _stop_once  # type: ignore[assignment]
    rendezvous_handler_registry.register(_BACKEND, _make_rendezvous)
    logs = PrivateDirectory()
    run_dir_file = logs.path / "run_dir"
    try:
        _bind(args)
        args.log_dir = args.log_dir or str(logs.path)
        with environment_set(RUN_DIR_FILE, str(run_dir_file)):
            run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        # only torchrun's report, which its traceback would hide
        sys.exit(f"{failed}\nbapo-megatron: {_describe_failure(failed, run_dir_file)}")
    except SignalException as error:
        sys.exit(f"bapo-megatron: {_describe_stop(error, run_dir_file)}")
    except ValueError as error:
        sys.exit(f"bapo_megatron.torchrun: {error}")
    finally:
        logs.close()


def _describe_failure(failed: ChildFailedError, run_dir_file: Path) -> str:
    """Why the ranks failed: the reason of the lowest rank that gave one, else the first exit.

    Rank 0, if it is on this node, has written its run directory to ``run_dir_file``.
    """
    for rank, failure in sorted(failed.failures.items()):
        message: Any = failure.message  # a record by ``cli``, or torchrun's own text
        if isinstance(message, dict):
            place = f"rank {rank}: " if rank else ""
            first_line = message["message"].splitlines()[0].removesuffix(":")
            has_remedy = message.get("extraInfo", {}).get("has_remedy", False)
            return f"{place}{first_line}{'' if has_remedy else _remedy(run_dir_file)}"
    # torchrun sends the others SIGTERM, and SIGKILL half a minute later. Ranks that lost a peer
    # have an exit status; the code of a signal is negative.
    rank, first = min(
        failed.failures.items(),
        key=lambda pair: (pair[1].exitcode == -signal.SIGTERM, pair[1].timestamp, pair[1].exitcode),
    )
    return f"rank {rank} ended by {describe_exit(first.exitcode)}{_remedy(run_dir_file) or _AGAIN}"


def _describe_stop(error: SignalException, run_dir_file: Path) -> str:
    """How the run ended: rank 0 writes a file once everything is saved."""
    is_saved = run_dir_file.exists() and (Path(run_dir_file.read_text()) / STOPPED_NAME).exists()
    how = "stopped" if is_saved else "ended"
    return f"{how} by {signal.Signals(error.sigval).name}{_remedy(run_dir_file) or _AGAIN}"


def _remedy(run_dir_file: Path) -> str:
    from bapo_megatron.trainer.opening import how_to_continue  # takes a moment to import

    return how_to_continue(Path(run_dir_file.read_text())) if run_dir_file.exists() else ""


if __name__ == "__main__":
    main()
