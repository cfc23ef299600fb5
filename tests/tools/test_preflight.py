"""``doctor --cluster`` on three machines: nothing to report, and each fault named by its node."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bapo_megatron.tools.doctor import Diagnosis
from bapo_megatron.tools.preflight import _compare, _judge_network
from tests.launch import REPOSITORY, free_port
from tests.tools.preflight_nodes import SLOW_LINK, Cluster, Fault, check, make_cluster, problems


def texts(findings: Iterator[Diagnosis]) -> list[str]:
    return [finding.text for finding in findings if finding.verdict == "problem"]


def test_what_differs_on_one_node_is_named_with_both_values() -> None:
    driver, older = "NVIDIA H100 80GB HBM3, 580.95.05", "NVIDIA H100 80GB HBM3, 570.86.15"
    equal = {"GPUs": "2", "GPU 0": driver, "GPU 1": driver}
    nodes = {"a": equal, "b": {**equal, "GPU 1": older}, "c": equal}
    assert texts(_compare("GPUs", nodes)) == [f"GPU 1: {older} on b; {driver} on a, c"]
    nodes["b"] = {"GPUs": "1", "GPU 0": driver}
    assert texts(_compare("GPUs", nodes)) == [
        f"GPU 1: not set on b; {driver} on a, c",
        "GPUs: 1 on b; 2 on a, c",
    ]


def test_many_nodes_that_agree_are_counted() -> None:
    nodes = {f"n{i}": {"X": "1"} for i in range(12)} | {"odd": {}}
    assert texts(_compare("settings", nodes)) == [
        "X: not set on odd; 1 on n0, n1, n2, n3, n4, n5, n6, n7 and 4 more"
    ]


def test_a_node_with_two_slow_links_is_named_and_one_slow_link_is_nobodys() -> None:
    speeds = {("a", "b"): 9.0, ("b", "c"): 1.0, ("c", "d"): 1.0, ("d", "a"): 9.0}
    assert texts(_judge_network(speeds, 5.0)) == [
        "b – c: 1 GB/s, floor 5",
        "c – d: 1 GB/s, floor 5",
        "c: both of its links are below the floor",
    ]
    assert texts(_judge_network({("all_reduce",): 9.0, ("a", "b"): 1.0}, 5.0)) == [
        "a – b: 1 GB/s, floor 5"
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with make_cluster(tmp_path_factory.mktemp("cluster")) as machines:
        yield machines


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[str]:
    """Address of a server on the last machine that takes weights through a gloo group."""
    last, port = cluster.nodes[-1], str(free_port())
    program = ("-m", "tests.weight_sync.broadcast_server", "--host", last.address, "--port", port)
    process = subprocess.Popen(
        [*last.prefix, sys.executable, *program], cwd=REPOSITORY, stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    probe = f"import socket; socket.create_connection(({last.address!r}, {port}), 5)"
    try:
        while subprocess.run(
            [*last.prefix, sys.executable, "-c", probe], stderr=subprocess.DEVNULL
        ).returncode:
            assert process.poll() is None, "the server ended"
        yield f"http://{last.address}:{port}"
    finally:
        process.kill()
        process.wait()


def servers_of(cluster: Cluster, *addresses: str) -> tuple[str, str]:
    master = cluster.nodes[0].address
    return (
        f"rollout.servers=[{','.join(addresses)}]",
        f"rollout.weight_sync.master_address={master}",
    )


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_machines_in_order_have_no_problem(cluster: Cluster, server: str) -> None:
    statuses, findings, _ = check(cluster, {}, *servers_of(cluster, server))
    assert statuses == [0, 0, 0], [row for row in findings if row["verdict"] != "ok"]
    assert [row["topic"] for row in findings] == [
        *("nodes", "ranks", "settings", "versions", "model", "data"),
        *("disk", "disk", "disk"),
        *("network",) * 5,
        "servers",
    ]
    names = ", ".join(f"{socket.gethostname()}[{number}]" for number in range(3))
    assert findings[0]["text"] == f"3 ranks on {names}; no GPU"
    assert re.fullmatch(rf"{server}: \d+\.\d MB in \d+\.\d\d s", findings[-1]["text"])
    assert not list((cluster.folder / "run").iterdir())


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_every_fault_is_named_by_its_node(cluster: Cluster, server: str) -> None:
    faults = {
        1: Fault(
            f"{cluster.full_disk()} && {cluster.other_model('changed')}",
            {"NCCL_IB_HCA": "mlx5_1", "NCCL_CUMEM_ENABLE": "1"},
        ),
        2: Fault(f"{cluster.other_model('lacking')} && {SLOW_LINK}"),
    }
    nobody = f"http://{cluster.nodes[0].address}:9"
    statuses, findings, err = check(cluster, faults, *servers_of(cluster, nobody))
    first, second, third = (re.escape(f"{socket.gethostname()}[{number}]") for number in range(3))
    digest = r"[0-9a-f]{12}"
    expected = [
        rf"settings: NCCL_CUMEM_ENABLE: 1 on {second}; 0 on {first}, {third}",
        rf"settings: NCCL_IB_HCA: mlx5_1 on {second}; mlx5_0 on {first}, {third}",
        rf"model: {cluster.model}/model.safetensors: {digest} on {second}; "
        rf"{digest} on {first}, {third}",
        rf"model: {cluster.model}/tokenizer_config.json: missing on {third}; "
        rf"{digest} on {first}, {second}",
        rf"disk: {cluster.folder}/run on {second}: no space left on device; free space, or .*",
        r"network: all_reduce: 0.00\d+ GB/s, floor 0.004",
        rf"network: {second} – {third}: 0.00\d+ GB/s, floor 0.004",
        rf"network: {third} – {first}: 0.00\d+ GB/s, floor 0.004",
        rf"network: {third}: both of its links are below the floor",
        rf"servers: {nobody}: .*",
    ]
    named = problems(findings)
    assert len(named) == len(expected), named
    for text, pattern in zip(named, expected, strict=True):
        assert re.fullmatch(pattern, text), (text, pattern)
    assert statuses == [1, 0, 0]
    assert err.splitlines()[-1] == (
        f"bapo-megatron: doctor --cluster: {len(expected)} problems; see the table"
    )
