"""One member of the collective group that brings weights to engines, and what it receives.

Members meet as in the ``init_custom_process_group`` that engines have in common: at a store of rank
0, under prefixes with the group's name. The process's other groups are not touched.
"""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.runtime.processes import environment_set


def join_group(place: GroupPlace, meet_s: float, limit_s: float) -> Any:
    """Meet the other members; return a process group (torch's stubs lack its collectives).

    ``meet_s`` limits every answer of the store, ``limit_s`` the group's operations.
    """
    store: Store = TCPStore(
        place.master_address, place.master_port, timeout=timedelta(seconds=meet_s)
    )
    # torch keeps the keys of a backend under the first device that it is made for.
    device = "cuda/" if place.backend == "nccl" else "cpu/"
    for prefix in (place.name, f"{place.name}/", device):
        store = PrefixStore(prefix, store)
    limit, rank = timedelta(seconds=limit_s), place.first_rank
    if place.backend == "gloo":
        return ProcessGroupGloo(store, rank, place.world_size, limit)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # not in a build for the CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    # Have the group raise if an operation fails; otherwise its watchdog ends the process.
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
        except Exception as error:  # noqa: BLE001 — whatever it is, who waits gets it
            future.set_exception(RuntimeError(str(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def tensor_sizes(layout: BucketLayout) -> list[int]:
    """Return the bytes of each tensor in a bucket."""
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
