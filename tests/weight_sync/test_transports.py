"""How rank 0 hands over buckets: by broadcast, and as memory that servers map."""

import base64
import pickle
import threading
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.engine import collective
from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.calls import Call
from bapo_megatron.weight_sync import send
from bapo_megatron.weight_sync.receive import Opened, Receive
from bapo_megatron.weight_sync.send import (
    AttemptFailedError,
    BroadcastTransport,
    Bucket,
    SharedMemoryTransport,
    shared_memory_payload,
)


def test_a_group_that_rank_zero_cannot_form_lets_the_servers_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their wait for rank 0 in the store ends, and the message has its reason."""
    monkeypatch.setattr(collective, "join_group", Mock(side_effect=RuntimeError("no GPUs found")))
    closed = threading.Event()
    transport = BroadcastTransport(WeightSyncConfig(), torch.device("cpu"))

    class Source:
        def start(self, call: Call[Any, Any], place: GroupPlace, /) -> Any:
            store = dist.TCPStore("127.0.0.1", place.master_port, timeout=timedelta(seconds=60))

            def wait_for_rank_zero() -> str:
                with pytest.raises(dist.DistNetworkError):
                    store.get("never set")
                closed.set()
                return "http://a:1: connection closed"

            return wait_for_rank_zero

    opened = Opened(addresses=(), num_ranks=(1,), gpus=((),), share_group=False)
    reasons = r"connection closed \(rank 0 could not form a group: no GPUs found\)"
    with pytest.raises(AttemptFailedError, match=reasons):
        transport.prepare(opened, Source())
    assert closed.is_set()

    content = Mock(start=lambda *_: lambda: None)
    with pytest.raises(RolloutError, match="the servers succeeded but rank 0 could not form"):
        transport.prepare(opened, content)
    transport.close()


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
        def start(self, call: Call[Any, Any], request: Receive, /) -> Any:
            payloads.append(request.bucket)
            return lambda: None

    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: collected.append("collected"))
    monkeypatch.setattr(send, "shared_memory_payload", lambda *_: f"to {moved[-1]}")
    transport = SharedMemoryTransport(torch.device("cuda", 0))
    opened = Opened(
        addresses=("http://own:1", "http://own:2", "http://other:3"),
        num_ranks=(2, 2, 1),
        gpus=((4, 5), (6, 7), ()),
        share_group=False,
    )
    transport.prepare(opened, Source())
    bucket = Bucket(BucketLayout((), (), ()), torch.zeros(8, dtype=torch.uint8), is_last=True)
    with Copies():
        await_taken = transport.send(bucket, Source())
    assert [str(device) for device in moved] == [f"cuda:{gpu}" for gpu in (4, 5, 6, 7, 0)]
    assert [len(of_server) for of_server in payloads[0]] == [2, 2, 1]
    assert collected == []
    await_taken()
    assert collected == ["collected"]


def test_payloads_hold_no_data() -> None:
    layout = BucketLayout(("a", "b"), ("float32", "bfloat16"), ((5000,), (2, 3)))
    flat = torch.arange(20012).to(torch.uint8)
    pickled = base64.b64decode(shared_memory_payload(layout, flat))
    assert len(pickled) < 2000
    opened = pickle.loads(pickled)
    assert opened["flattened_tensor"].equal(flat)
    assert opened["flattened_tensor"].data_ptr() == flat.data_ptr()  # the same memory, here
    # What sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata holds.
    names = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    assert [tuple(getattr(meta, name) for name in names) for meta in opened["metadata"]] == [
        ("a", (5000,), torch.float32, 0, 20000, 20000),
        ("b", (2, 3), torch.bfloat16, 20000, 20012, 12),
    ]
