"""Process groups of a trainer rank, and the few collectives that are used outside policy/.

Collectives over ``ProcessGroups.control`` raise ``LostPeerError`` if another rank has exited.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.section import is_loopback
from bapo_megatron.runtime.processes import environment_set, launched_number, nccl_settings

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_PEER_LOSS_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Pair is closed",
)
"""gloo's messages about a lost peer, for which it has no error class."""


class LostPeerError(RuntimeError):
    """Another rank exited while this one waited for it."""

    def __init__(self) -> None:
        super().__init__("another rank exited; its own message says why")


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """This rank's coordinates, and the groups it belongs to."""

    tensor: dist.ProcessGroup
    """Ranks that shard every layer of one model replica and see the same tokens."""
    context: dist.ProcessGroup
    """Ranks that shard every sequence of a micro-batch."""
    data: dist.ProcessGroup
    """Ranks with the same part of the model and different tokens, of size
    ``data_size · context.size()``. Gradients and sums over tokens are reduced over it."""
    pipeline: dist.ProcessGroup
    """Ranks that hold successive layers of one model replica."""
    expert: dist.ProcessGroup
    """Ranks that divide the experts of each layer."""
    expert_tensor: dist.ProcessGroup
    """Ranks that divide each expert and see the same of its tokens."""
    expert_data: dist.ProcessGroup
    """Ranks with the same experts: the gradients of experts are reduced over it."""
    control: dist.ProcessGroup
    """All ranks over gloo, with the timeout ``parallel.timeout_s``. Ranks wait for batches here:
    a rollout may outlast any NCCL timeout."""
    device: torch.device
    """The model's device."""
    rank: int
    world_size: int
    data_rank: int
    """Index of this rank's share of the samples."""
    data_size: int
    virtual_size: int
    """Model chunks per rank; above 1 the schedule is interleaved."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipeline.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank sees logits."""
        return self.pipeline.rank() == self.pipeline.size() - 1


def init_world(timeout_s: float) -> tuple[torch.device, dist.ProcessGroup]:
    """Join the process group that torchrun's environment describes.

    Without torchrun's environment the process is the only rank.

    Returns:
        This rank's device, and a gloo group of all ranks beside the default group, which is NCCL's
        where there are GPUs.

    Raises:
        ValueError: torchrun's environment is incomplete.
    """
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:  # all ranks would take GPU 0
        raise ValueError(
            "LOCAL_RANK: must be set where RANK is; start ranks with python -m "
            "bapo_megatron.torchrun, or unset RANK"
        )
    os.environ.update(nccl_settings())  # before NCCL reads them for good
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launched_number("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    place: dict[str, Any] = {"timeout": timeout}
    if "RANK" not in os.environ:
        place |= {"store": HashStore(), "rank": 0, "world_size": 1}
    if device.type == "cuda":
        place["device_id"] = device  # otherwise NCCL guesses it at the first barrier
    with _gloo_within(os.environ.get("MASTER_ADDR", "")):
        dist.init_process_group(backend, **place)
        control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup), "every rank is a member"
    return device, control


def init_distributed(parallel: ParallelConfig) -> ProcessGroups:
    """Join the process group as ``init_world`` does, and build Megatron's groups.

    Without CUDA the shims of ``policy.cpu_compat.install`` must be in place. ``config.check`` has
    checked the group sizes.
    """
    # Imported late, because megatron takes seconds and not every importer needs it.
    from megatron.core import parallel_state

    device, control = init_world(parallel.timeout_s)
    with _gloo_within(os.environ.get("MASTER_ADDR", "")):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=(
                parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
            ),
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor_size,
            distributed_timeout_minutes=parallel.timeout_s / 60,  # becomes a timedelta
        )
    return megatron_groups(parallel, control, device)


@contextmanager
def _gloo_within(master_address: str) -> Iterator[None]:
    """Bind gloo's groups to the loopback if the ranks' rendezvous is there.

    Only during set-up: weight sync may have members on other nodes.
    """
    if not is_loopback(master_address) or _GLOO_INTERFACE in os.environ:
        yield
        return
    with environment_set(_GLOO_INTERFACE, "lo"):
        yield


def megatron_groups(
    parallel: ParallelConfig, control: dist.ProcessGroup, device: torch.device
) -> ProcessGroups:
    """Return this rank's coordinates in Megatron's groups."""
    from megatron.core import parallel_state

    return ProcessGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        control=control,
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        virtual_size=parallel.virtual_pipeline,
    )


def record_collectives(logs: Path) -> None:
    """Turn on torch's flight recorder, which NCCL dumps if a collective times out.

    Call it before ``init_distributed``, but after starting servers, which would write there too.
    Variables that the user has set are kept.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{logs.absolute()}/nccl_trace_rank_")


def write_collectives(logs: Path, rank: int) -> None:
    """Write this rank's flight-recorder traces of NCCL and gloo, for ``torchfrtrace``."""
    for backend, name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
        dump = getattr(torch._C._distributed_c10d, name, None)  # no NCCL in CPU builds
        if dump is not None:
            (logs / f"{backend}_trace_rank_{rank}").write_bytes(dump())


def own_store(prefix: str) -> Store:
    """Return a separate client of the process group's store, with prefixed keys."""
    store: Any = dist.distributed_c10d._get_default_store()
    return PrefixStore(prefix, store.clone())


def shutdown_distributed() -> None:
    """Destroy all process groups, if there are any."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def broadcast_bytes(data: bytes | None, groups: ProcessGroups) -> bytes:
    """Broadcast a few bytes from rank 0, as ``broadcast_buffer`` does."""
    return bytes(broadcast_buffer(None if data is None else bytearray(data), groups))


def broadcast_buffer(data: bytearray | None, groups: ProcessGroups) -> bytearray:
    """Broadcast bytes from rank 0, without a copy; collective over ``groups.control``.

    Rank 0 passes the payload and gets it back; the other ranks pass None.
    """
    assert (data is None) != (groups.rank == 0), "only rank 0 passes the payload"
    num_bytes = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    with _peer_loss_raised():
        dist.broadcast(num_bytes, src=0, group=groups.control)
        payload = bytearray(int(num_bytes.item())) if data is None else data
        if payload:
            content = torch.frombuffer(payload, dtype=torch.uint8)
            dist.broadcast(content, src=0, group=groups.control)
    return payload


def broadcast_answer(
    answer: Callable[[], bytes] | None,
    groups: ProcessGroups,
    interval_s: float,
    on_wait: Callable[[], object] = lambda: None,
) -> bytes:
    """Broadcast the result of ``answer`` on rank 0, at least one byte; other ranks pass None.

    ``answer`` may take longer than any timeout and must not use collectives: every ``interval_s`` a
    thread of rank 0 tells the other ranks to keep waiting. All ranks then call ``on_wait``, which
    may be a collective over ``groups.control``.
    """
    if answer is None:
        while not (payload := broadcast_bytes(None, groups)):
            on_wait()
        return payload
    ended = threading.Event()

    def keep_waiting() -> None:
        with suppress(RuntimeError):  # the next collective of this rank fails as well
            while not ended.wait(interval_s):
                broadcast_bytes(b"", groups)
                on_wait()

    thread = threading.Thread(target=keep_waiting, name="keep-waiting", daemon=True)
    thread.start()
    try:
        payload = answer()
    finally:
        ended.set()
        thread.join()
    assert payload, "an empty payload means to keep waiting"
    return broadcast_bytes(payload, groups)


def reduce_over(
    group: dist.ProcessGroup, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce a tensor over a group, in place; a group of one rank needs no collective."""
    if group.size() > 1:
        dist.all_reduce(value, op=op, group=group)


def broadcast_from_last_stage(value: Tensor, groups: ProcessGroups) -> None:
    """Broadcast a tensor from the last pipeline stage, in place; one stage needs no collective."""
    if groups.pipeline.size() > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline.size() - 1)
        dist.broadcast(value, src=last, group=groups.pipeline)


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return, on all ranks of a gloo group, whether ``flag`` is set on any of them."""
    value = torch.tensor([int(flag)], dtype=torch.int32)
    with _peer_loss_raised():
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


def first_message(message: str | None, groups: ProcessGroups) -> str | None:
    """Return, on every rank, the message of the lowest rank that has one, or None.

    Collective over ``groups.control``.
    """
    messages: list[str | None] = [None] * groups.world_size
    with _peer_loss_raised():
        dist.all_gather_object(messages, message, group=groups.control)
    return next((text for text in messages if text is not None), None)


def gather_objects[Value](value: Value, groups: ProcessGroups) -> list[Value] | None:
    """Gather a picklable value of each rank on rank 0, in rank order; None elsewhere.

    Collective over ``groups.control``.
    """
    gathered: list[Any] | None = [None] * groups.world_size if groups.rank == 0 else None
    with _peer_loss_raised():
        dist.gather_object(value, gathered, dst=0, group=groups.control)
    return gathered


def barrier(groups: ProcessGroups) -> None:
    """Wait for every rank, over ``groups.control`` with its timeout."""
    with _peer_loss_raised():
        dist.barrier(group=groups.control)


def is_peer_loss(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank exited, by gloo's message."""
    return any(text in str(error) for text in _PEER_LOSS_TEXTS)


@contextmanager
def fail_together(groups: ProcessGroups, kind: type[Exception] = OSError) -> Iterator[None]:
    """Run a block on all ranks; an error of type ``kind`` on one of them is raised on all.

    Also a barrier. A rank that failed raises its own error; the others raise one with the message
    of the lowest rank that failed. Errors of other types must occur on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except kind as caught:
        error = caught
    message = first_message(None if error is None else str(error), groups)
    if error is not None:
        raise error
    if message is not None:
        raise kind(f"another rank: {message}")


@contextmanager
def _peer_loss_raised() -> Iterator[None]:
    """Raise ``LostPeerError`` if a collective in the block finds that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
        raise LostPeerError from error
