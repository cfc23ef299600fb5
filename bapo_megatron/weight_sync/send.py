"""The trainer's side of a weight sync: pause, send, resume.

Rank 0 calls the collector (``receive``), which chooses the servers and removes those that fail.
With the ranks of its replica it gathers the weights bucket by bucket, so that no rank holds the
whole model, and sends each bucket to the servers through a transport; meanwhile all other ranks
wait outside the model's collectives, for as long as a server takes. Adapters are one bucket. With
``rollout.weight_sync.method: disk`` there is no transport: all ranks write a directory, which the
servers load.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.engine.base import BucketLayout
from bapo_megatron.engine.collective import (
    WeightGroup,
    choose_backend,
    rank_zero_address,
    tensor_sizes,
    unpack,
)
from bapo_megatron.errors import RolloutError
from bapo_megatron.policy.adapters import adapter_table
from bapo_megatron.policy.architecture import Weight
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.policy.weight_export import plan_buckets, stored_dtype
from bapo_megatron.policy.weight_table import stored_shapes, weight_table
from bapo_megatron.runtime.calls import Caller
from bapo_megatron.runtime.distributed import broadcast_bytes, fail_together
from bapo_megatron.weight_sync import receive
from bapo_megatron.weight_sync.locate import locate
from bapo_megatron.weight_sync.verify import Comparison

_LOG = logging.getLogger(__name__)
_BYTES_PER_MB = 10**6
_END = b"end"
Scorer = Callable[[Sequence[Sequence[int]]], tuple[tuple[float, ...], ...] | None]
"""Returns, on rank 0, the log-probs of all tokens of each sequence but the first, at temperature 1;
collective over all ranks."""
_MAX_STUCK_S = 180.0
"""Longer than the time limit of any operation in an abandoned group."""
_DEVICE_ARGUMENT = 6
"""Position of the device among the arguments of ``reductions.rebuild_cuda_tensor``."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The cost of one weight sync."""

    num_bytes: int
    """Bytes of the weights that each server got, counted once."""
    sync_s: float
    """Duration from the first call to the last."""
    pause_s: float
    """Part of it for which generation was paused."""
    difference: float | None = None
    """As in ``receive.Resumed``."""


def sync_metrics(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Return a step's ``weight_sync/…`` metrics (docs/metrics.md); empty without reports."""
    if not reports:
        return {}
    values = {
        "weight_sync/syncs": float(len(reports)),
        "weight_sync/bytes": float(sum(report.num_bytes for report in reports)),
        "weight_sync/sync_s": math.fsum(report.sync_s for report in reports),
        "weight_sync/pause_s": math.fsum(report.pause_s for report in reports),
    }
    differences = [report.difference for report in reports if report.difference is not None]
    if differences:
        values["weight_sync/logprob_difference"] = max(differences)
    return values


class WeightSync:
    """Keeps the servers' weights equal to the policy's."""

    def __init__(
        self,
        config: WeightSyncConfig,
        run_dir: Path,
        score: Scorer,
        device: torch.device,
        *,
        sends_adapters: bool = False,
    ) -> None:
        """Choose the transport; ``disk`` keeps the newest version in ``<run_dir>/weights``."""
        self._config = config
        self._sends_adapters = sends_adapters
        self._score = score
        self._root = run_dir / "weights"
        self._transport: Transport | None = None
        if config.method == "broadcast":
            self._transport = BroadcastTransport(config, device)
        elif config.method == "tensor":
            self._transport = SharedMemoryTransport(device)
        self._version: int | None = None

    def sync(
        self, state: TrainState, collector: Caller | None, *, again: bool = False
    ) -> SyncReport | None:
        """Sync the policy's weights to all servers as version ``state.num_updates``.

        Collective over all ranks; only rank 0 has the ``collector``. With ``again``, sync a version
        that was synced before, because some servers lack it. Returns the cost; None if there was
        nothing to do, and on all ranks but 0.

        Raises:
            RolloutError: No server took the weights, or rank 0 could not send them; on all ranks.
            OSError: ``method: disk`` cannot write; on all ranks.
        """
        model, version = state.model, state.num_updates
        assert (collector is not None) == (model.groups.rank == 0), "only rank 0 calls"
        if version == self._version and not again:
            return None
        started_s = time.monotonic()
        probe: bytes | None = None
        with fail_together(model.groups, RolloutError):
            num_bytes = self._send(model, collector, version)
            if collector is not None:
                probe = json.dumps(collector.start(receive.PROBE, None)()).encode()
        sequences = json.loads(broadcast_bytes(probe, model.groups))
        expected = self._score(sequences) if sequences else ()
        try:
            with fail_together(model.groups, RolloutError):
                if collector is not None:
                    assert expected is not None, "complete on rank 0"
                    resumed = collector.start(receive.RESUME, expected)()
        except RolloutError as error:
            if self._version is not None or self._sends_adapters or not sequences:
                raise
            rescore = functools.partial(self._rescore, state, collector, sequences)
            cause = locate(model, rescore, self._config.verify_tolerance)
            raise RolloutError(f"{error}{cause}") from error
        self._version = version
        if collector is None:
            return None
        sync_s = time.monotonic() - started_s
        return SyncReport(num_bytes, sync_s, resumed.pause_s, resumed.difference)

    def _rescore(
        self, state: TrainState, collector: Caller | None, probe: Sequence[Sequence[int]]
    ) -> Comparison | None:
        """Sync the weights again, and compare a server with the trainer, on rank 0."""
        with fail_together(state.model.groups, RolloutError):
            self._send(state.model, collector, state.num_updates)
            server = () if collector is None else collector.start(receive.SCORE, None)()
        rows = self._score(probe)
        return None if rows is None else Comparison(np.array(server), np.concatenate(rows))

    def close(self) -> None:
        """Leave the group, and remove the weights on disk; rank 0 only."""
        if self._transport is not None:
            self._transport.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _send(self, model: Model, collector: Caller | None, version: int) -> int:
        """Send the weights to the servers; return their bytes on rank 0."""
        if self._transport is None:
            model_dir = self._root / f"version_{version:08d}"
            if version != self._version:
                export = model.export_adapter if self._sends_adapters else model.export_hf
                export(model_dir, durable=False)
            return 0 if collector is None else self._load(model_dir, collector, version)
        model.finish_weights()
        max_bytes = self._config.bucket_mb * _BYTES_PER_MB
        buckets = WeightBuckets(model, max_bytes, holds_adapters=self._sends_adapters)
        if collector is None:
            buckets.follow()
            return 0
        try:
            return _send_all(buckets, collector, version, self._transport)
        finally:
            buckets.end()
            if self._config.method == "tensor" and model.groups.device.type == "cuda":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()  # servers on the same GPU allocate their KV cache next

    def _load(self, model_dir: Path, collector: Caller, version: int) -> int:
        """Have the servers load a directory; keep only the newest version on disk."""
        with _raised_on_all():
            request = receive.Load(model_dir=model_dir.absolute(), version=version)
            collector.start(receive.LOAD, request)()
            for earlier in self._root.iterdir():
                if earlier != model_dir:
                    shutil.rmtree(earlier)
            return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


class Bucket(NamedTuple):
    """Some Hugging Face tensors, contiguous in memory."""

    layout: BucketLayout
    flat: Tensor
    """uint8 [bytes], on the model's device."""
    is_last: bool


class WeightBuckets:
    """The buckets of a model's weights; rank 0 drives, all other ranks call ``follow``."""

    def __init__(self, model: Model, max_bytes: int, *, holds_adapters: bool = False) -> None:
        """Plan buckets of ``max_bytes``, or one larger parameter, equally on all ranks.

        Adapters are one bucket in float32, because engines load them whole.
        """
        self._model = model
        self._gather: Callable[[Sequence[Weight]], Iterator[tuple[str, Tensor]]]
        self._gather = model.gather_weights
        self._dtype: torch.dtype = model.chunks[0].config.params_dtype
        if holds_adapters:
            assert model.lora is not None, "refused by check_settings"
            self._gather, self._dtype = lambda _: model.gather_adapters(), torch.float32
            self._plan = [adapter_table(model.hf, model.lora.config)]
        else:
            self._plan = plan_buckets(weight_table(model.hf), model.hf, self._dtype, max_bytes)

    def __len__(self) -> int:
        return len(self._plan)

    def gather(self, number: int) -> Bucket:
        """Gather a bucket on rank 0, with the ranks that ``follow``."""
        model = self._model
        broadcast_bytes(str(number).encode(), model.groups)
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        for weight in self._plan[number]:
            shapes |= stored_shapes(weight, model.hf)
            name = str(stored_dtype(weight, self._dtype)).removeprefix("torch.")
            dtypes |= dict.fromkeys(weight.hf, name)
        layout = BucketLayout(tuple(shapes), tuple(dtypes.values()), tuple(shapes.values()))
        flat = torch.empty(sum(tensor_sizes(layout)), dtype=torch.uint8, device=model.groups.device)
        weights = self._gather(self._plan[number])
        for (name, target), (gathered, tensor) in zip(unpack(layout, flat), weights, strict=True):
            assert name == gathered, "weights come in the order of the table"
            target.copy_(tensor)
        return Bucket(layout, flat, is_last=number + 1 == len(self))

    def end(self) -> None:
        """End ``follow`` on the other ranks."""
        broadcast_bytes(_END, self._model.groups)

    def follow(self) -> None:
        """Take part in every ``gather`` of rank 0, until ``end``."""
        while (message := broadcast_bytes(None, self._model.groups)) != _END:
            for _ in self._gather(self._plan[int(message)]):
                pass


def _send_all(buckets: WeightBuckets, collector: Caller, version: int, transport: Transport) -> int:
    """Send all buckets, after a failure again to the remaining servers; return their bytes."""
    failure = ""
    while True:
        try:
            return _attempt(buckets, collector, version, transport)
        except AttemptFailedError as error:
            failure = f" (before: {error})"
            _LOG.warning("weights version %d: %s; all are sent again", version, error)
            transport.give_up()
        except RolloutError as error:
            raise RolloutError(f"{error}{failure}") from error


def _attempt(buckets: WeightBuckets, collector: Caller, version: int, transport: Transport) -> int:
    """Send all buckets; gather the next while the servers load the last."""
    opened = collector.start(receive.BEGIN, version)()
    with _raised_on_all():
        transport.prepare(opened, collector)
    num_bytes = 0
    await_loaded: Callable[[], None] | None = None
    for number in range(len(buckets)):
        bucket = buckets.gather(number)
        if await_loaded is not None:
            await_loaded()
        with _raised_on_all():
            await_loaded = transport.send(bucket, collector)
        num_bytes += bucket.flat.numel()
    assert await_loaded is not None, "a model has parameters"
    await_loaded()
    return num_bytes


class AttemptFailedError(Exception):
    """A server failed; the others get the weights in a new attempt."""


@contextmanager
def _raised_on_all() -> Iterator[None]:
    """Turn an error of rank 0 itself into a ``RolloutError``, which all ranks raise."""
    try:
        yield
    except RolloutError:
        raise
    except (OSError, RuntimeError) as error:
        raise RolloutError(
            f"rank 0 cannot send the weights ({error}); free shared memory (/dev/shm), ports "
            "or disk, lower rollout.weight_sync.bucket_mb, or change rollout.weight_sync.method; "
            "then continue with resume=true"
        ) from error


class BroadcastTransport:
    """Broadcasts buckets in a collective group, which lasts while its members stay the same."""

    def __init__(self, config: WeightSyncConfig, device: torch.device) -> None:
        """Prepare for buckets on ``device``; nothing is opened before the first weight sync."""
        self._config = config
        self._device = device
        self._group: WeightGroup | None = None
        self._stuck: list[Future[None]] = []

    def prepare(self, opened: receive.Opened, collector: Caller) -> None:
        """Form a group with the servers, unless they still share one."""
        if opened.share_group and self._group is not None:
            return
        self.give_up()
        address = rank_zero_address(opened.addresses, self._config.master_address)
        backend = choose_backend(self._config.backend, self._device, opened.addresses)
        world_size = 1 + sum(opened.num_ranks)
        self._group = group = WeightGroup(address, backend, world_size, self._config.timeout_s)
        joined = collector.start(receive.JOIN, group.place)
        self._await_both(joined, group.form(), "form a group")

    def send(self, bucket: Bucket, collector: Caller) -> Callable[[], None]:
        """Broadcast a bucket; the returned function waits until all servers have loaded it."""
        assert self._group is not None, "prepare comes first"
        request = receive.Receive(bucket=bucket.layout, is_last=bucket.is_last)
        received = collector.start(receive.RECEIVE, request)
        sent = self._group.broadcast(bucket.flat)
        return functools.partial(self._await_both, received, sent, "send the weights")

    def give_up(self) -> None:
        """Close the group; a stuck operation ends later."""
        group, self._group = self._group, None
        if group is not None and (stuck := group.close()) is not None:
            self._stuck.append(stuck)

    def close(self) -> None:
        """Close the group, and wait for stuck operations."""
        self.give_up()
        # A thread inside a collective at interpreter exit would abort the process.
        wait(self._stuck, _MAX_STUCK_S)

    def _await_both(
        self, servers: Callable[[], str | None], rank_zero: Future[None], what: str
    ) -> None:
        """Wait for servers and rank 0; raise ``RolloutError`` if only rank 0 failed.

        Otherwise the message has both reasons, because it is unknown which came first.
        """
        if (failure := servers()) is not None:
            error = rank_zero.exception() if rank_zero.done() else None
            cause = "" if error is None else f" (rank 0 could not {what}: {error})"
            raise AttemptFailedError(failure + cause) from error
        try:
            rank_zero.result(self._config.timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise RolloutError(
                f"the servers succeeded but rank 0 could not {what} ({error}); check "
                "rollout.weight_sync.backend, or set rollout.weight_sync.method: disk"
            ) from error


class SharedMemoryTransport:
    """Shares buckets with servers on the same node, which map the memory."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for buckets on ``device``."""
        self._device = device
        self._ranks: list[list[torch.device]] = []
        if device.type == "cpu":
            _start_manager()

    def prepare(self, opened: receive.Opened, collector: Caller) -> None:
        """Note the GPU of every server rank that will map the buckets."""
        self._ranks = [
            [torch.device("cuda", gpu) for gpu in gpus] or [self._device] * count
            for gpus, count in zip(opened.gpus, opened.num_ranks, strict=True)
        ]

    def send(self, bucket: Bucket, collector: Caller) -> Callable[[], None]:
        """Share a bucket with every rank of every server; return as ``BroadcastTransport``."""
        # A copy on each rank's own GPU: to map memory of rank 0's GPU, each of seven other servers
        # would need a CUDA context of 0.5 GB there.
        copies = [[bucket.flat.to(device) for device in devices] for devices in self._ranks]
        payloads = tuple(
            tuple(shared_memory_payload(bucket.layout, flat) for flat in flats) for flats in copies
        )
        request = receive.Receive(bucket=payloads, is_last=bucket.is_last)
        taken = collector.start(receive.RECEIVE, request)

        def await_taken(_: object = copies) -> None:  # keeps the memory until it is loaded
            if (failure := taken()) is not None:
                raise AttemptFailedError(failure)
            if self._device.type == "cuda":
                # Frees the previous bucket.
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

        return await_taken

    def give_up(self) -> None:
        """Do nothing."""

    close = give_up


def shared_memory_payload(layout: BucketLayout, flat: Tensor) -> str:
    """Return a bucket for another process of the node, which maps the same memory.

    The payload is a torch.multiprocessing pickle, as base64: on the CPU it names a file in shared
    memory, on a GPU it has a CUDA IPC handle and event. It contains a dict of ``flattened_tensor``
    (``flat``, uint8) and ``metadata``: the name, shape, dtype, first byte, end and size of each
    tensor, as attributes. An engine's unpickler must allow only torch's own classes and
    ``functools.partial``.

    Open a payload once, because torch counts the processes that map the memory, and keep the tensor
    until then.
    """
    metadata, end = [], 0
    for (name, tensor), size in zip(unpack(layout, flat), tensor_sizes(layout), strict=True):
        # The only type with attributes that engines must allow.
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

    It lives as long as a server maps one, so it may outlive this process, and must not inherit its
    standard error: a reader would never see the end.
    """
    stderr, before, nothing = 2, os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stderr)
    try:
        with _files_by_name():
            torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(before, stderr)
        os.close(before)
        os.close(nothing)


class _Pickler(ForkingPickler):
    """Names GPUs by UUID, because other processes may number them differently."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return value.__reduce__()  # multiprocessing's reducer loses the attributes
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        function, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        before, after = arguments[:_DEVICE_ARGUMENT], arguments[_DEVICE_ARGUMENT + 1 :]
        return function, (*before, uuid, *after)


@contextmanager
def _files_by_name() -> Iterator[None]:
    """Share host memory by file name; torch's other strategy, descriptors, needs a local socket."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


Transport = BroadcastTransport | SharedMemoryTransport
