"""The collective group through which servers get weights: rank 0 here, all others in servers.

Nothing of the trainer's own process groups is touched. Members meet as in the
``init_custom_process_group`` that engines have in common: at a store of rank 0, under prefixes with
the group's name.

A server that ends or hangs leaves rank 0 in a collective that nothing can interrupt (gloo) or that
has no time limit of its own (NCCL's set-up). Every operation therefore runs in a thread, and a
group whose thread is stuck is given up with it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import uuid
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

Backend = Literal["nccl", "gloo"]

LOOPBACK = "127.0.0.1"
_FORM_S = 120.0
"""Longest time in which a group forms."""
_READY_S = 60.0
_SLOWEST_BYTES_PER_S = 10e6
"""A broadcast may take ``_READY_S`` and its bytes at this rate."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def rank_zero_address(servers: Sequence[str], configured: str) -> str:
    """Address of this process as the servers see it.

    Args:
        servers: Their addresses, ``http://host:port``; an engine in the collector's process has no
            host.
        configured: ``rollout.weight_sync.master_address``; may be empty.
    """
    if configured:
        return configured
    hosts = [urlsplit(server).hostname or LOOPBACK for server in servers]
    return LOOPBACK if all(_is_loopback(host) for host in hosts) else socket.gethostname()


def choose_backend(configured: str, device: torch.device, servers: Sequence[str]) -> Backend:
    """The backend that ``rollout.weight_sync.backend`` means.

    NCCL has no two members on one GPU, and an engine in the collector's process may be on rank 0's.

    Args:
        configured: The key.
        device: Rank 0's.
        servers: As in ``rank_zero_address``.
    """
    if configured != "auto":
        return "nccl" if configured == "nccl" else "gloo"
    are_elsewhere = all(urlsplit(server).hostname for server in servers)
    return "nccl" if device.type == "cuda" and are_elsewhere else "gloo"


class WeightGroup:
    """One group; made for a set of servers, closed when that changes."""

    def __init__(self, address: str, backend: Backend, timeout_s: float) -> None:
        """Open the store, on the loopback alone if that is the address.

        Args:
            address: As ``rank_zero_address``.
            backend: Of the group.
            timeout_s: Upper limit for every operation.

        Raises:
            OSError: No port can be opened.
        """
        self.name = f"bapo-megatron-{uuid.uuid4().hex}"
        self.address = address
        self.backend: Backend = backend
        self._timeout_s = timeout_s
        self._group: Any = None  # torch's stubs lack the collectives of a backend
        self._running: Future[None] | None = None
        with _listen(address) as listener:
            self.port: int = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                LOOPBACK,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._form_s),
                master_listen_fd=listener.detach(),  # the store closes it
            )

    def form(self, world_size: int) -> Future[None]:
        """Start to meet the other ranks; the result is there when all have come."""
        limit = timedelta(seconds=self._form_s)

        def meet() -> None:
            # A client of its own: closing the server, which only this object holds, ends the wait.
            store: Store = TCPStore(LOOPBACK, self.port, timeout=limit)
            for prefix in (self.name, f"{self.name}/", _device_prefix(self.backend)):
                store = PrefixStore(prefix, store)
            self._group = self._connect(store, world_size)

        return self._start(meet)

    def broadcast(self, flat: Tensor) -> Future[None]:
        """Start to send a tensor to all other ranks; it must not change until they have it."""
        group = self._group
        assert group is not None, "form comes first"
        limit_s = min(self._timeout_s, _READY_S + flat.numel() / _SLOWEST_BYTES_PER_S)
        limit = timedelta(seconds=limit_s)

        def send() -> None:
            with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
                group.broadcast(flat, root=0, timeout=limit).wait(limit)

        return self._start(send)

    def close(self) -> Future[None] | None:
        """Leave the group and close the store.

        Returns:
            The operation that is stuck, if there is one: it ends by its time limit.
        """
        self._store = None
        group, self._group = self._group, None
        running = self._running
        if running is None or running.done():
            if group is not None:
                group.shutdown()
            return None
        if group is not None:
            group.abort()  # interrupts NCCL
        return running

    @property
    def _form_s(self) -> float:
        return min(self._timeout_s, _FORM_S)

    def _connect(self, store: Store, world_size: int) -> Any:
        if self.backend == "gloo":
            gloo = ProcessGroupGloo(store, 0, world_size, timedelta(seconds=self._timeout_s))
            gloo._set_sequence_number_for_group()  # the other ranks wait for the number
            return gloo
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in a build for the CPU

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        with _blocking_wait():
            nccl = ProcessGroupNCCL(store, 0, world_size, options)
        nccl._set_sequence_number_for_group()
        return nccl

    def _start(self, operation: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._running = future

        def run() -> None:
            try:
                operation()
            except Exception as error:  # noqa: BLE001 — whatever it is, who waits gets it
                # Before the other ranks fail for it, so that whoever hears of them finds the cause.
                future.set_exception(RuntimeError(str(error)))
                # Closes its connections and the store, which wakes the other ranks.
                self._group = self._store = None
            else:
                future.set_result(None)

        threading.Thread(target=run, name=self.name, daemon=True).start()
        return future


def _device_prefix(backend: Backend) -> str:
    """Where torch keeps the keys of a backend: under the first device it is made for."""
    return "cuda/" if backend == "nccl" else "cpu/"


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _listen(address: str) -> socket.socket:
    """A socket on a free port of the loopback, or of all interfaces."""
    if _is_loopback(address):
        return socket.create_server((LOOPBACK, 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=1024)


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Have an NCCL group raise where an operation fails; else its watchdog ends the process."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before
