"""The collective group that broadcasts weights from rank 0 to engines, and its buckets.

The rendezvous is that of ``init_custom_process_group``, which engines have in common: a store of
rank 0, with prefixes from the group's name. Other groups of the process are not touched.
"""

import math
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from bapo_megatron.config.section import is_loopback
from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.runtime.processes import environment_set

LOOPBACK = "127.0.0.1"
_MAX_FORM_S = 120.0
"""Time limit for forming a group."""
_READY_S, _MIN_BYTES_PER_S = 60.0, 10e6
"""Time limit of a broadcast: this long, plus the time of its bytes at this rate."""


def join_group(place: GroupPlace, store_limit_s: float, limit_s: float) -> Any:
    """Join a group; return a process group (torch's stubs lack its collectives).

    ``store_limit_s`` limits each answer of the store, ``limit_s`` the group's operations.
    """
    store: Store = TCPStore(
        place.master_address, place.master_port, timeout=timedelta(seconds=store_limit_s)
    )
    # torch prefixes a backend's keys with the first device that it is created for.
    device = "cuda/" if place.backend == "nccl" else "cpu/"
    for prefix in (place.name, f"{place.name}/", device):
        store = PrefixStore(prefix, store)
    limit, rank = timedelta(seconds=limit_s), place.first_rank
    if place.backend == "gloo":
        return ProcessGroupGloo(store, rank, place.world_size, limit)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # not in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    # Makes failed operations raise; otherwise NCCL's watchdog would abort the process.
    with environment_set("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return ProcessGroupNCCL(store, rank, place.world_size, options)


def start_thread[T](operation: Callable[[], T], name: str) -> Future[T]:
    """Run a collective, which nothing can interrupt, in a daemon thread that can be abandoned.

    The future cannot be cancelled; whatever the operation raises becomes a ``RuntimeError``.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(operation())
        except Exception as error:  # noqa: BLE001 — passed on to the waiting thread
            future.set_exception(RuntimeError(str(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def tensor_sizes(layout: BucketLayout) -> list[int]:
    """Return the size of each tensor in a bucket, in bytes."""
    return [
        math.prod(shape) * getattr(torch, dtype).itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    ]


def unpack(layout: BucketLayout, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a bucket, as views of its bytes (``flat``, uint8)."""
    parts = flat.split(tensor_sizes(layout))  # type: ignore[no-untyped-call]
    for name, dtype, shape, part in zip(
        layout.names, layout.dtypes, layout.shapes, parts, strict=True
    ):
        yield name, part.view(getattr(torch, dtype)).view(shape)


def rank_zero_address(servers: Sequence[str], configured: str) -> str:
    """Return the address at which servers reach this process.

    ``configured`` is ``rollout.weight_sync.master_address``.
    """
    if configured:
        return configured
    hosts = [urlsplit(server).hostname or LOOPBACK for server in servers]
    return LOOPBACK if all(is_loopback(host) for host in hosts) else socket.gethostname()


def choose_backend(configured: str, device: torch.device, servers: Sequence[str]) -> str:
    """Resolve ``rollout.weight_sync.backend``.

    NCCL refuses two members on one GPU by default, and a local engine may be on rank 0's.
    """
    if configured != "auto":
        return configured
    are_elsewhere = all(urlsplit(server).hostname for server in servers)
    return "nccl" if device.type == "cuda" and are_elsewhere else "gloo"


class WeightGroup:
    """Rank 0's end of a group with a fixed set of servers.

    If a server exits or hangs, rank 0 is stuck in a collective that nothing can interrupt (gloo) or
    that has no time limit of its own (NCCL's set-up). Every operation therefore runs in a thread,
    and a group with a stuck thread is abandoned.
    """

    def __init__(self, address: str, backend: str, world_size: int, timeout_s: float) -> None:
        """Open the store, only on the loopback if that is the address."""
        self._timeout_s = timeout_s
        self._form_s = min(timeout_s, _MAX_FORM_S)
        self._group: Any = None
        self._running: Future[None] | None = None
        with _listen(address) as listener:
            port: int = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._form_s),
                master_listen_fd=listener.detach(),  # the store closes it
            )
        name = f"bapo-megatron-{uuid.uuid4().hex}"
        self.place = GroupPlace(name, address, port, backend, 0, world_size)
        """Rank 0's."""

    def form(self) -> Future[None]:
        """Start forming the group; the future is done once all ranks have joined."""
        place = replace(self.place, master_address=LOOPBACK)

        def join() -> None:
            # Through a separate store client: closing the server ends the wait.
            self._group = join_group(place, self._form_s, self._timeout_s)

        return self._start(join)

    def broadcast(self, flat: Tensor) -> Future[None]:
        """Start broadcasting a tensor, which must not change until all ranks have it."""
        group = self._group
        assert group is not None, "form comes first"
        limit_s = min(self._timeout_s, _READY_S + flat.numel() / _MIN_BYTES_PER_S)
        limit = timedelta(seconds=limit_s)

        def send() -> None:
            with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
                group.broadcast(flat, root=0, timeout=limit).wait(limit)

        return self._start(send)

    def close(self) -> Future[None] | None:
        """Leave the group and close the store; return a stuck operation, which will time out."""
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

    def _start(self, operation: Callable[[], None]) -> Future[None]:
        self._running = start_thread(operation, self.place.name)
        # Closed before the other ranks fail because of it, so that this error is seen as the cause.
        self._running.add_done_callback(self._close_if_failed)
        return self._running

    def _close_if_failed(self, future: Future[None]) -> None:
        """Close connections and store after an error, which wakes the other ranks."""
        if future.exception() is not None:
            self._group = self._store = None


def _listen(address: str) -> socket.socket:
    """Open a socket on a free port of the loopback, or of all interfaces."""
    if is_loopback(address) or not socket.has_dualstack_ipv6():
        host = LOOPBACK if is_loopback(address) else ""
        return socket.create_server((host, 0), backlog=1024)
    return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
