"""The group through which engines get weights: where its members meet, and what ends it."""

import socket
import time

import psutil
import pytest
import torch

from bapo_megatron.engine.collective import WeightGroup, choose_backend, rank_zero_address

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


def test_a_group_that_does_not_form_ends_when_it_is_closed() -> None:
    group = WeightGroup("127.0.0.1", "gloo", 2, timeout_s=120)
    forming = group.form()
    time.sleep(0.5)
    assert not forming.done()
    assert group.close() is forming
    with pytest.raises(RuntimeError):
        forming.result(60)
