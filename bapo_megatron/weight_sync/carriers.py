"""Brings weights from rank 0 to the servers, bucket by bucket: no rank holds the whole model.

Rank 0 says which bucket is next, and the ranks of its replica gather it with rank 0. All others
wait for its word outside the collectives of the model, for as long as a server takes. A bucket
travels through a collective group or as shared memory; the third way, a directory, needs no
carrier (``send``).
"""

import base64
import functools
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.engine.base import BucketLayout
from bapo_megatron.engine.collective import tensor_sizes, unpack
from bapo_megatron.errors import RolloutError
from bapo_megatron.policy.hf_weights import hf_shapes
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.policy.weight_export import gather_weights, plan_buckets
from bapo_megatron.runtime.calls import Caller
from bapo_megatron.runtime.distributed import broadcast_bytes
from bapo_megatron.weight_sync import messages
from bapo_megatron.weight_sync.collective_group import (
    WeightGroup,
    choose_backend,
    rank_zero_address,
)

_END = b"end"
_EXPORT = b"export"
_MAX_STUCK_S = 180.0
"""More than the time limit of any operation of a group that was given up."""
_STDERR = 2
_DEVICE_ARGUMENT = 6
"""Position of the device among the arguments of ``reductions.rebuild_cuda_tensor``."""


class Bucket(NamedTuple):
    """Some Hugging Face tensors in one piece of memory, one after the other."""

    layout: BucketLayout
    flat: Tensor
    """uint8 [bytes], on the policy's device."""
    is_last: bool


class WeightBuckets:
    """The buckets of a policy; rank 0 calls all methods but ``follow``, all others that one."""

    def __init__(self, policy: MegatronPolicy, max_bytes: int) -> None:
        """Plan them, alike on all ranks; ``finish_weights`` has finished the policy's weights.

        A bucket has at most ``max_bytes``, unless it holds a single larger parameter.
        """
        self._policy = policy
        self._dtype: torch.dtype = policy.chunks[0].config.params_dtype
        self._plan = plan_buckets(policy.hf, self._dtype, max_bytes)

    def __len__(self) -> int:
        return len(self._plan)

    def gather(self, number: int) -> Bucket:
        """Gather a bucket on rank 0, with the ranks that ``follow``."""
        policy = self._policy
        broadcast_bytes(str(number).encode(), policy.groups)
        shapes: dict[str, tuple[int, ...]] = {}
        for weight in self._plan[number]:
            shapes |= hf_shapes(weight, policy.hf)
        dtypes = (str(self._dtype).removeprefix("torch."),) * len(shapes)
        layout = BucketLayout(tuple(shapes), dtypes, tuple(shapes.values()))
        flat = torch.empty(
            sum(tensor_sizes(layout)), dtype=torch.uint8, device=policy.groups.device
        )
        targets = unpack(layout, flat)
        for (name, target), (gathered, tensor) in zip(targets, self._iterate(number), strict=True):
            assert name == gathered, "weights come in the order of the table"
            target.copy_(tensor)
        return Bucket(layout, flat, is_last=number + 1 == len(self))

    def export(self, directory: Path) -> None:
        """Write all weights to a Hugging Face directory, with the ranks that ``follow``."""
        broadcast_bytes(_EXPORT, self._policy.groups)
        self._policy.export_hf(directory, durable=False)

    def end(self) -> None:
        """Tell the ranks that ``follow`` that no bucket is needed any more."""
        broadcast_bytes(_END, self._policy.groups)

    def follow(self, directory: Path) -> None:
        """Take part in what rank 0 gathers or exports, until it ends."""
        while (word := broadcast_bytes(None, self._policy.groups)) != _END:
            if word == _EXPORT:
                with suppress(OSError):  # raised on all ranks; rank 0 decides what follows
                    self._policy.export_hf(directory, durable=False)
            elif self._policy.groups.is_first_replica:
                for _ in self._iterate(int(word)):
                    pass

    def _iterate(self, number: int) -> Iterator[tuple[str, Tensor]]:
        policy = self._policy
        return gather_weights(policy.chunks, policy.hf, policy.groups, self._plan[number])


class AttemptFailedError(Exception):
    """A server failed; the others get the weights in another attempt, first by the disk."""


def check(failure: str | None) -> None:
    """Raise ``AttemptFailedError`` where the collector reports that a server failed."""
    if failure is not None:
        raise AttemptFailedError(failure)


@contextmanager
def handed_over() -> Iterator[None]:
    """Turn a failure on rank 0's own side into a ``RolloutError``, of which all ranks hear."""
    try:
        yield
    except RolloutError:
        raise
    except (OSError, RuntimeError) as error:
        raise RolloutError(
            f"rank 0 cannot hand over the weights ({error}); free shared memory (/dev/shm), ports "
            "or disk, lower rollout.weight_sync.bucket_mb, or change rollout.weight_sync.method; "
            "then continue with resume=true"
        ) from error


class BroadcastCarrier:
    """Through a collective group, which stays as long as its members do."""

    def __init__(self, config: WeightSyncConfig, device: torch.device) -> None:
        """Prepare for buckets on ``device``; nothing is opened before the first sync."""
        self._config = config
        self._device = device
        self._group: WeightGroup | None = None
        self._stuck: list[Future[None]] = []

    def prepare(self, opened: messages.Opened, collector: Caller) -> None:
        """Form a group with the servers that the collector named, unless they still share one."""
        if opened.share_group and self._group is not None:
            return
        self.give_up()
        address = rank_zero_address(opened.addresses, self._config.master_address)
        backend = choose_backend(self._config.backend, self._device, opened.addresses)
        world_size = 1 + sum(opened.num_ranks)
        self._group = group = WeightGroup(address, backend, world_size, self._config.timeout_s)
        joined = collector.start(messages.JOIN, group.place)
        self._await_both(joined, group.form(), "form a group")

    def send(self, bucket: Bucket, collector: Caller) -> Callable[[], None]:
        """Broadcast a bucket; the returned function waits until all servers have loaded it."""
        assert self._group is not None, "prepare comes first"
        request = messages.Receive(bucket=bucket.layout, is_last=bucket.is_last)
        received = collector.start(messages.RECEIVE, request)
        sent = self._group.broadcast(bucket.flat)
        return functools.partial(self._await_both, received, sent, "send the weights")

    def give_up(self) -> None:
        """Close the group; an operation that is stuck in it ends later."""
        group, self._group = self._group, None
        if group is not None and (stuck := group.close()) is not None:
            self._stuck.append(stuck)

    def close(self) -> None:
        """Close the group, and wait for operations that are stuck."""
        self.give_up()
        # A thread inside a collective at the end of the interpreter would abort the process.
        wait(self._stuck, _MAX_STUCK_S)

    def _await_both(self, servers: Callable[[], str | None], own: Future[None], what: str) -> None:
        """Wait for an operation of servers and of rank 0.

        Raise ``RolloutError`` where rank 0 alone failed. Where a server and rank 0 did, the message
        has both reasons: who was first is not known.
        """
        try:
            check(servers())
        except AttemptFailedError as failure:
            error = own.exception() if own.done() else None
            if error is None:
                raise
            raise AttemptFailedError(f"{failure} (rank 0 could not {what}: {error})") from error
        try:
            own.result(self._config.timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise RolloutError(
                f"the servers did their part but rank 0 could not {what} ({error}); check "
                "rollout.weight_sync.backend, or set rollout.weight_sync.method: disk"
            ) from error


class MemoryCarrier:
    """Through memory that servers on the same node map."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for buckets on ``device``."""
        self._device = device
        self._ranks: list[list[torch.device]] = []
        if device.type == "cpu":
            _start_manager()

    def prepare(self, opened: messages.Opened, collector: Caller) -> None:
        """Remember which processes open each bucket, and on which GPUs."""
        self._ranks = [
            [torch.device("cuda", gpu) for gpu in gpus] or [self._device] * count
            for gpus, count in zip(opened.gpus, opened.num_ranks, strict=True)
        ]

    def send(self, bucket: Bucket, collector: Caller) -> Callable[[], None]:
        """Describe a bucket to every rank of every server; returns as ``BroadcastCarrier``."""
        # Each on its rank's own GPU: to map another one's, seven servers of a node would each take
        # 0.5 GB of rank 0's GPU for a CUDA context there.
        copies = [[bucket.flat.to(device) for device in devices] for devices in self._ranks]
        payloads = tuple(
            tuple(shared_memory_payload(bucket.layout, flat) for flat in flats) for flats in copies
        )
        request = messages.Take(payloads=payloads, is_last=bucket.is_last)
        taken = collector.start(messages.TAKE, request)

        def await_taken(_: object = copies) -> None:  # whose memory must stay until it is loaded
            check(taken())
            if self._device.type == "cuda":
                # Frees the bucket before this one.
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

        return await_taken

    def give_up(self) -> None:
        """Do nothing."""

    close = give_up


Carrier = BroadcastCarrier | MemoryCarrier


def shared_memory_payload(layout: BucketLayout, flat: Tensor) -> str:
    """Describe a bucket for one other process of the node, which maps the same memory.

    It is what torch.multiprocessing pickles, as base64: on the CPU the name of a file in shared
    memory, on a GPU one handle and one event of CUDA IPC. The pickle is SGLang's "flattened
    bucket", a dict of ``flattened_tensor`` (``flat``, uint8) and ``metadata``: the name, shape,
    dtype, first byte, end and size of each tensor, as attributes. An engine's unpickler need not
    admit other classes than those that torch names, and ``functools.partial``.

    Open a payload once: torch counts the processes that map the memory. Keep the tensor until then.
    """
    metadata, end = [], 0
    for (name, tensor), size in zip(unpack(layout, flat), tensor_sizes(layout), strict=True):
        # Of all that SGLang's unpickler admits, what may have attributes.
        entry: functools.partial[object] = functools.partial(dict)
        place = {"start_idx": end, "end_idx": end + size, "numel": size}
        vars(entry).update(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, **place)
        metadata.append(entry)
        end += size
    buffer = io.BytesIO()
    with _files_by_name():
        _Pickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _start_manager() -> None:
    """Start torch's process that removes the files of shared host memory.

    It lives as long as a server maps one, so beyond this process, and must not hold its standard
    error: whoever reads that to its end would wait.
    """
    kept, nothing = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, _STDERR)
    try:
        with _files_by_name():
            torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nothing)


class _Pickler(ForkingPickler):
    """Names a GPU by its uuid, for the other process may number GPUs in another way."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return value.__reduce__()  # multiprocessing's own loses the attributes
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        function, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        before, after = arguments[:_DEVICE_ARGUMENT], arguments[_DEVICE_ARGUMENT + 1 :]
        return function, (*before, uuid, *after)


@contextmanager
def _files_by_name() -> Iterator[None]:
    """Share host memory by file names; torch's other way, open files, does not travel over HTTP."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
