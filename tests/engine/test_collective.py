"""The group through which engines get weights: where its members meet, and what ends it."""

import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, rendezvous

from bapo_megatron.engine.collective import WeightGroup, choose_backend, rank_zero_address
from tests.distributed_launch import run_ranks

LOCAL = ("http://127.0.0.1:30000", "http://localhost:30001", "http://[::1]:30002")


@pytest.mark.parametrize(
    ("servers", "configured", "address"),
    [
        (LOCAL, "", "127.0.0.1"),
        ((*LOCAL, "http://node7:30000"), "", socket.gethostname()),
        (LOCAL, "10.0.0.5", "10.0.0.5"),
        (("local",), "", "127.0.0.1"),  # an engine in the collector's process
    ],
)
def test_servers_meet_rank_zero_at_an_address_that_they_reach(
    servers: tuple[str, ...], configured: str, address: str
) -> None:
    assert rank_zero_address(servers, configured) == address


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
