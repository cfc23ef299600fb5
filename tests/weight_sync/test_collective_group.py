"""The group through which servers get weights, and what travels without it."""

from __future__ import annotations

import base64
import io
import pickle
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, rendezvous
from torch.overrides import TorchFunctionMode

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.engine.base import BucketLayout
from bapo_megatron.errors import RolloutError
from bapo_megatron.weight_sync import carriers, collective_group
from bapo_megatron.weight_sync.carriers import (
    AttemptFailedError,
    BroadcastCarrier,
    Bucket,
    MemoryCarrier,
    shared_memory_payload,
)
from bapo_megatron.weight_sync.collective_group import (
    WeightGroup,
    choose_backend,
    rank_zero_address,
)
from bapo_megatron.weight_sync.messages import Opened, Take
from tests.distributed_launch import run_ranks

if TYPE_CHECKING:
    from bapo_megatron.engine.base import GroupPlace
    from bapo_megatron.runtime.calls import Call

LIMIT = timedelta(seconds=60)
LOCAL = ("http://127.0.0.1:30000", "http://localhost:30001", "http://[::1]:30002")


def test_servers_on_the_loopback_meet_rank_zero_there() -> None:
    assert rank_zero_address(LOCAL, "") == "127.0.0.1"


def test_servers_elsewhere_meet_rank_zero_at_its_host_name() -> None:
    assert rank_zero_address((*LOCAL, "http://node7:30000"), "") == socket.gethostname()


def test_a_configured_address_of_rank_zero_is_used() -> None:
    assert rank_zero_address(LOCAL, "10.0.0.5") == "10.0.0.5"


def test_an_engine_in_the_collectors_process_meets_rank_zero_on_the_loopback() -> None:
    assert rank_zero_address(("local",), "") == "127.0.0.1"


@pytest.mark.parametrize(
    ("configured", "device", "servers", "backend"),
    [
        ("auto", "cpu", LOCAL, "gloo"),
        ("auto", "cuda", LOCAL, "nccl"),
        ("auto", "cuda", ("local",), "gloo"),  # on rank 0's GPU
        ("gloo", "cuda", LOCAL, "gloo"),
        ("nccl", "cpu", LOCAL, "nccl"),
    ],
)
def test_the_backend_follows_the_devices(
    configured: str, device: str, servers: tuple[str, ...], backend: str
) -> None:
    assert choose_backend(configured, torch.device(device), servers) == backend


@pytest.mark.parametrize(("address", "hosts"), [("127.0.0.1", {"127.0.0.1"}), ("node7", {"::"})])
def test_the_store_listens_on_the_loopback_alone_if_all_servers_are_there(
    address: str, hosts: set[str]
) -> None:
    group = WeightGroup(address, "gloo", 2, timeout_s=10)
    try:
        port = group.place.master_port
        listening = {
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
    finally:
        group.close()
    if not socket.has_dualstack_ipv6():
        hosts = {"0.0.0.0" if host == "::" else host for host in hosts}
    assert listening == hosts


def _member(port: int, name: str, num_tensors: int) -> list[float]:
    """What an SGLang rank does in ``init_custom_process_group`` and with broadcasts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limit = timedelta(seconds=60)
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=limit,
    )
    sums = []
    for _ in range(num_tensors):
        tensor = torch.empty(10, dtype=torch.uint8)
        group.broadcast(tensor, 0).wait()
        sums.append(float(tensor.sum()))
    return sums


@pytest.mark.distributed
def test_rank_zero_broadcasts_to_a_member_without_groups_of_its_own() -> None:
    group = WeightGroup("127.0.0.1", "gloo", 2, timeout_s=120)
    place = group.place
    results: list[list[float]] = []
    member = threading.Thread(
        target=lambda: results.extend(run_ranks(_member, 1, place.master_port, place.name, 2))
    )
    member.start()
    group.form().result(120)
    for value in (1, 2):
        group.broadcast(torch.full((10,), value, dtype=torch.uint8)).result(120)
    member.join(120)
    assert results == [[10.0, 20.0]]
    assert not dist.is_initialized()
    assert group.close() is None


def test_a_group_that_does_not_form_ends_when_it_is_closed() -> None:
    group = WeightGroup("127.0.0.1", "gloo", 2, timeout_s=120)
    forming = group.form()
    time.sleep(0.5)
    assert not forming.done()
    assert group.close() is forming
    with pytest.raises(RuntimeError):
        forming.result(60)


def test_a_group_that_rank_zero_cannot_form_lets_the_servers_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their wait for rank 0 in the store ends, and the message has its reason."""
    monkeypatch.setattr(collective_group, "join_group", lambda *_: _raise("no GPUs found"))
    closed = threading.Event()
    carrier = BroadcastCarrier(WeightSyncConfig(), torch.device("cpu"))

    class Source:
        def start(self, call: Call[Any, Any], place: GroupPlace, /) -> Any:
            store = dist.TCPStore("127.0.0.1", place.master_port, timeout=LIMIT)

            def wait_for_rank_zero() -> str:
                with pytest.raises(dist.DistNetworkError):
                    store.get("never set")
                closed.set()
                return "http://a:1: connection closed"

            return wait_for_rank_zero

    opened = Opened(addresses=(), num_ranks=(1,), gpus=((),), share_group=False)
    with pytest.raises(
        AttemptFailedError,
        match=r"connection closed \(rank 0 could not form a group: no GPUs found\)",
    ):
        carrier.prepare(opened, Source())
    assert closed.is_set()
    carrier.close()


def test_a_failure_of_rank_zero_alone_is_not_blamed_on_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_group, "join_group", lambda *_: _raise("no GPUs found"))
    carrier = BroadcastCarrier(WeightSyncConfig(), torch.device("cpu"))

    class Source:
        def start(self, call: Call[Any, Any], place: GroupPlace, /) -> Any:
            return lambda: None

    opened = Opened(addresses=(), num_ranks=(), gpus=(), share_group=False)
    with pytest.raises(RolloutError, match="rank 0 could not form a group"):
        carrier.prepare(opened, Source())
    carrier.close()


def _raise(message: str) -> None:
    raise RuntimeError(message)


def test_payloads_hold_no_data_and_only_classes_that_sglang_admits() -> None:
    layout = BucketLayout(("a", "b"), ("float32", "bfloat16"), ((5000,), (2, 3)))
    flat = torch.arange(20012).to(torch.uint8)
    pickled = base64.b64decode(shared_memory_payload(layout, flat))
    assert len(pickled) < 2000
    found: set[tuple[str, str]] = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    opened = Recorder(io.BytesIO(pickled)).load()
    assert opened["flattened_tensor"].equal(flat)
    assert opened["flattened_tensor"].data_ptr() == flat.data_ptr()  # the same memory, here
    # What sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata holds.
    names = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    assert [tuple(getattr(meta, name) for name in names) for meta in opened["metadata"]] == [
        ("a", (5000,), torch.float32, 0, 20000, 20000),
        ("b", (2, 3), torch.bfloat16, 20000, 20012, 12),
    ]
    # All of them are in ALLOWED_GLOBALS of sglang.srt.utils.common.SafeUnpickler of 0.5.23.
    assert found == {
        ("builtins", "dict"),
        ("functools", "partial"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch", "uint8"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("torch.storage", "UntypedStorage"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    }


def test_each_rank_of_own_servers_gets_a_bucket_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPUs are pretended; nothing is on them."""
    collected: list[str] = []
    moved: list[torch.device] = []
    payloads: list[tuple[tuple[str, ...], ...]] = []

    class Copies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), _: Any = None) -> Any:
            assert func is torch.Tensor.to
            moved.append(args[1])
            return args[0]

    class Source:
        def start(self, call: Call[Any, Any], request: Take, /) -> Any:
            payloads.append(request.payloads)
            return lambda: None

    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: collected.append("collected"))
    monkeypatch.setattr(carriers, "shared_memory_payload", lambda *_: f"to {moved[-1]}")
    carrier = MemoryCarrier(torch.device("cuda", 0))
    opened = Opened(
        addresses=("http://own:1", "http://own:2", "http://other:3"),
        num_ranks=(2, 2, 1),
        gpus=((4, 5), (6, 7), ()),
        share_group=False,
    )
    carrier.prepare(opened, Source())
    bucket = Bucket(BucketLayout((), (), ()), torch.zeros(8, dtype=torch.uint8), is_last=True)
    with Copies():
        await_taken = carrier.send(bucket, Source())
    assert [str(device) for device in moved] == [f"cuda:{gpu}" for gpu in (4, 5, 6, 7, 0)]
    assert [len(of_server) for of_server in payloads[0]] == [2, 2, 1]
    assert collected == []
    await_taken()
    assert collected == ["collected"]
