"""Starting, watching and ending a server's processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.teacher import as_policy
from bapo_megatron.engine.load import load_kind
from bapo_megatron.engine.sglang import SHARED_FILES
from bapo_megatron.engine.sglang import server as sglang_server
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import shared_files, unlink_shared_files
from tests.engine.helpers import MakeConfig, descendants
from tests.engine.sglang.servers import KEYS, server_config
from tests.launch import free_port
from tests.reward.own_functions import EVEN_LENGTH

OWNER = """
import os, sys, time
from pathlib import Path
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.rollout.client import CollectorClient
config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
client = CollectorClient(config, on_progress=print)
client.launch()
if os.fork() == 0:  # as checkpoint writers are: a process that holds the same pipes and sockets
    time.sleep(60)
    os._exit(0)
client.wait_ready()
"""

SHARER = """
import mmap, multiprocessing, sys, time
lock = multiprocessing.get_context("spawn").Lock()
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print(f"/dev/shm/sem.{lock._semlock.name.lstrip('/')}", flush=True)
time.sleep(600)
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _server(
    run_dir: Path,
    device: str = "cpu",
    index: int = 0,
    host: str = "127.0.0.1",
    *,
    colocated: bool = False,
    **server: object,
) -> SglangServer:
    config = server_config(run_dir, run_dir, seed=4, server=server, colocated=colocated)
    return SglangServer(config, device, KEYS, index, host)


def test_a_port_or_an_address_that_cannot_be_had_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    port = free_port()
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", port))
        occupant.listen()
        server = _server(tmp_path, port=port)
        with pytest.raises(RolloutError, match=rf"^rollout\.server: .* port {port} "):
            server.start()
    assert not (tmp_path / "logs").exists()
    server.close()
    for host in ("192.0.2.1", "no.such.host"):
        with pytest.raises(RolloutError, match=rf"^rollout\.server: .* host {host}, "):
            _server(tmp_path, host=host).start()


def test_nobody_else_gets_the_port_while_the_server_loads(tmp_path: Path) -> None:
    server = _server(tmp_path)
    server.start()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
        with socket.create_server(("127.0.0.1", server.port)):  # as the server itself will
            pass
    finally:
        server.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))


ALWAYS = {"--host=127.0.0.1", "--dtype=float32", "--random-seed=4", "--sleep-on-idle"}
CPU_ONLY = {
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--grammar-backend=none",
    # Without a limit it would take most of the memory that it shares with the trainer.
    "--max-total-tokens=65536",
}


def test_with_a_gpu_no_cpu_argument_is_given(tmp_path: Path) -> None:
    on_gpu = _server(tmp_path, device="cuda", tensor=2, max_running_requests=16).arguments()
    on_cpu = _server(tmp_path, device="cpu", extra_args=("--log-requests",)).arguments()
    assert set(on_cpu) >= CPU_ONLY | ALWAYS
    assert on_cpu[-1] == "--log-requests"
    assert ALWAYS | {"--tensor-parallel-size=2", "--max-running-requests=16"} <= set(on_gpu)
    assert not CPU_ONLY & set(on_gpu)
    assert not any("--max-total-tokens" in argument for argument in on_gpu)


def test_a_server_of_adapters_reads_the_base_and_has_room_for_their_rank_and_targets(
    tmp_path: Path,
) -> None:
    sync = {"adapters": "adapter", "method": "disk"}
    lora = LoraConfig(rank=8, targets=("down_proj", "o_proj"))
    config = server_config(tmp_path, tmp_path, lora=lora, weight_sync=sync)
    arguments = SglangServer(config, "cpu", KEYS, awaits_weights=True).arguments()
    assert arguments[-7:] == [
        "--enable-lora",
        "--max-lora-rank=8",
        "--max-loras-per-batch=2",
        "--lora-target-modules",
        "down_proj",
        "o_proj",
        "--lora-backend=torch_native",
    ]
    assert "--weight-version=none" in arguments
    assert "--load-format=dummy" not in arguments
    others = SglangServer(config, "cpu", KEYS).arguments()  # of an evaluation
    assert not any("lora" in argument for argument in others)


def test_the_servers_of_a_host_have_gpus_and_ports_one_after_the_other(tmp_path: Path) -> None:
    sizes = {"count": 3, "port": 30000, "tensor": 4}
    servers = [_server(tmp_path, "cuda", index, host="10.0.0.7", **sizes) for index in range(3)]
    assert [server.address for server in servers] == [
        f"http://10.0.0.7:{port}" for port in (30000, 30001, 30002)
    ]
    gpus = [[a for a in server.arguments() if "gpu-id" in a] for server in servers]
    assert gpus == [["--base-gpu-id=0"], ["--base-gpu-id=4"], ["--base-gpu-id=8"]]
    after_the_trainer = _server(tmp_path, "cuda", 1, count=2, tensor=2, first_gpu=4)
    assert after_the_trainer.gpus == (6, 7)
    assert "--base-gpu-id=6" in after_the_trainer.arguments()
    assert _server(tmp_path, first_gpu=4).gpus == ()
    assert servers[2].log_path == tmp_path / "logs" / "sglang_10.0.0.7_2.log"
    assert _server(tmp_path).log_path == tmp_path / "logs" / "sglang.log"
    assert _server(tmp_path, host="::1", port=1).address == "http://[::1]:1"


def test_no_two_servers_of_a_run_share_a_seed(tmp_path: Path) -> None:
    hosts = ("127.0.0.1", "10.0.0.7", "node3")
    seeds = [
        next(a for a in _server(tmp_path, index=index, host=host).arguments() if "seed" in a)
        for host in hosts
        for index in range(2)
    ]
    # 4 and the number; beside the loopback also the CRC-32 of the host.
    host_seeds = (0, 0xCF9D64A6, 0x6BE1446C)
    assert seeds == [
        f"--random-seed={4 + n + host_seed}" for host_seed in host_seeds for n in (0, 1)
    ]


def test_a_server_may_be_closed_from_two_threads_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_server, "LAUNCHER", "timeit")  # any process will do
    server = _server(tmp_path)
    for _ in range(5):
        server.start()
        with ThreadPoolExecutor(2) as threads:
            for closed in [threads.submit(server.close) for _ in range(2)]:
                closed.result()
        assert not server.is_started


MEMORY_SAVER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
ALLOCATOR = dict.fromkeys(
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"
)


@pytest.mark.parametrize(
    ("kind", "inherited", "expected"),
    [
        ({"device": "cpu"}, {}, {"OMP_NUM_THREADS": "1"}),
        ({"device": "cpu"}, {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}),
        ({"device": "cuda"}, ALLOCATOR, {"NCCL_CUMEM_ENABLE": "0", **ALLOCATOR}),
        # SGLang captures graphs in memory that can be released only if the variable is set, and
        # then refuses its default backend for prefill. Its saver refuses expandable segments.
        (
            {"device": "cuda", "colocated": True},
            {"NCCL_CUMEM_ENABLE": "1", **ALLOCATOR},
            {"NCCL_CUMEM_ENABLE": "1", MEMORY_SAVER: "1"},
        ),
    ],
)
def test_a_server_has_an_environment_for_its_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: dict[str, Any],
    inherited: dict[str, str],
    expected: dict[str, str],
) -> None:
    names = {"OMP_NUM_THREADS", "NCCL_CUMEM_ENABLE", MEMORY_SAVER, *ALLOCATOR}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    server = _server(tmp_path, **kind)
    environment = server.environment()
    assert {name: environment[name] for name in names & environment.keys()} == {
        "NCCL_CUMEM_ENABLE": "0",
        **expected,
    }
    saver = {"--enable-memory-saver", "--cuda-graph-backend-prefill=disabled"}
    assert saver & set(server.arguments()) == (saver if "colocated" in kind else set())


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (
            {"speculative": {"method": "draft", "draft_model": "/small", "draft_tokens": 3}},
            "--speculative-algorithm=STANDALONE --speculative-num-draft-tokens=4"
            " --speculative-num-steps=3 --speculative-eagle-topk=1"
            " --speculative-draft-model-path=/small --speculative-draft-load-format=auto"
            " --load-format=dummy",
        ),
        (
            {"speculative": {"method": "mtp", "draft_tokens": 2}},
            "--speculative-algorithm=EAGLE --speculative-num-draft-tokens=3"
            " --speculative-num-steps=2 --speculative-eagle-topk=1"
            " --speculative-draft-model-path={model} --speculative-draft-load-format=auto"
            " --load-format=dummy",
        ),
        # Dummy weights could not be replaced.
        ({"quantization": "fp8"}, "--quantization=fp8 --load-format=flash_rl"),
    ],
)
def test_acceleration_is_turned_on_and_survives_a_start_without_weights(
    tmp_path: Path, server: dict[str, object], expected: str
) -> None:
    config = server_config(tmp_path, tmp_path, server=server)
    arguments = SglangServer(config, "cuda", KEYS, awaits_weights=True).arguments()
    beginnings = ("--speculative", "--load-format", "--quantization", "--weight-version")
    given = {argument for argument in arguments if argument.startswith(beginnings)}
    assert given == {"--weight-version=none", *expected.format(model=tmp_path).split()}


def test_servers_return_experts_where_the_trainer_replays_them(tmp_path: Path) -> None:
    config = server_config(tmp_path, tmp_path)
    algorithm = config.algorithm.model_copy(update={"router_replay": "rollout"})
    replaying = config.model_copy(update={"algorithm": algorithm})
    argument = "--enable-return-routed-experts"
    assert argument not in SglangServer(config, "cpu", KEYS).arguments()
    assert argument in SglangServer(replaying, "cpu", KEYS).arguments()
    assert argument not in SglangServer(as_policy(replaying), "cpu", KEYS).arguments()


def test_of_the_shared_files_only_those_of_the_ended_group_are_removed(tmp_path: Path) -> None:
    mine, others = (Path(f"/dev/shm/sglang_loads_{tmp_path.name}_{n}.shm") for n in range(2))
    others.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", SHARER, str(mine)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        semaphore = Path(process.stdout.readline().strip())
        assert mine.exists()
        assert semaphore.exists()
        assert shared_files(process.pid, SHARED_FILES) == {mine, semaphore}
        unlink_shared_files(process.pid, SHARED_FILES, [mine])
        assert not mine.exists()
        assert not semaphore.exists()
        assert others.exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        mine.unlink(missing_ok=True)
        others.unlink()


@pytest.mark.sglang
@pytest.mark.exhaustive
def test_no_process_or_temporary_file_outlives_an_owner_that_is_killed(
    make_config: MakeConfig, tmp_path: Path, scratch: Path
) -> None:
    config = tmp_path / "config.json"
    reward = RewardConfig.model_validate({"functions": [EVEN_LENGTH], "workers": 1})
    config.write_text(make_config().model_copy(update={"reward": reward}).model_dump_json())
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(config)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        deadline_s = time.monotonic() + 120
        sockets: list[Path] = []
        while not (_has_everything(descendants(owner.pid)) and sockets):
            assert owner.poll() is None
            assert time.monotonic() < deadline_s, descendants(owner.pid)
            time.sleep(0.2)
            sockets = [path for path in scratch.rglob("*") if path.is_socket()]
        assert {path.parent.parent for path in sockets} == {scratch}
        launcher = next(p for p in descendants(owner.pid) if "sglang.launcher" in str(p.cmdline()))
        shared = shared_files(launcher.pid, SHARED_FILES)
        command_line = psutil.Process(owner.pid).cmdline()
        started = descendants(owner.pid)
        forked = {process for process in started if process.cmdline() == command_line}
    finally:
        owner.kill()
        owner.wait()
    assert not psutil.wait_procs(started - forked, timeout=20)[1]
    assert list(scratch.iterdir()) == []
    assert not any(path.exists() for path in shared)
    for process in forked:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have noticed by itself
            process.kill()


def _has_everything(started: set[psutil.Process]) -> bool:
    """Collector and launcher run, and the launcher has spawned the server's other processes."""
    lines = [" ".join(process.cmdline()) for process in started if process.is_running()]
    spawned = [line for line in lines if "spawn_main" in line or "sglang::" in line]
    return any("rollout.collector" in line for line in lines) and len(spawned) >= 2


def test_own_servers_share_random_keys_and_are_connected_to_where_they_listen(
    make_config: MakeConfig,
) -> None:
    config = make_config(server={"count": 2, "port": 30000})
    kind = load_kind("sglang")
    first, second = (kind.open(config, "cpu", awaits_weights=True) for _ in range(2))
    keys = [server.keys for backend in (first, second) for server in backend.servers]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert [len(key) for key in (keys[0].api_key, keys[0].admin_api_key)] == [32, 32]
    assert keys[0].api_key != keys[0].admin_api_key
    addresses = ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]
    assert [server.address for server in first.servers] == addresses
    assert first.addresses() == addresses
