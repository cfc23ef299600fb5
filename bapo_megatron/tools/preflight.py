"""Checks all nodes of a run before it starts: ``doctor --cluster``, on every rank of torchrun.

The first rank of a node describes it; all ranks measure the network together. Rank 0 judges what
differs between nodes and what is below a floor, and names the nodes.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import BucketLayout, Engine
from bapo_megatron.engine.collective import WeightGroup, choose_backend, rank_zero_address
from bapo_megatron.engine.load import load_kind
from bapo_megatron.errors import describe_cause, describe_os_error
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.runtime.distributed import init_world
from bapo_megatron.runtime.files import sampled_digest
from bapo_megatron.runtime.gpus import count_gpus
from bapo_megatron.runtime.processes import launched_number, nccl_settings
from bapo_megatron.runtime.versions import nccl_version, own_software
from bapo_megatron.tools.doctor import Diagnosis
from bapo_megatron.tools.planning.memory import OPTIMIZER_BYTES, model_parameters

NETWORK_FLOORS = {"nccl": 10.0, "gloo": 0.1}  # GB/s: less than a 100 Gbit/s port; 0.8 Gbit/s
_TIMEOUT_S, _SERVER_S = 90.0, 30.0
_MESSAGE_BYTES = (1 << 20, 1 << 24, 1 << 28)
_ENOUGH_S = 0.25  # for a message: no larger one follows
_CHUNK_BYTES, _DISK_BYTES, _DISK_S = 16 << 20, 1 << 30, 2.0
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "CUDA_DEVICE_MAX", "PYTORCH_", "OMP_")
_MISSING = "missing"
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Node:
    """What the first rank of a node says of it."""

    name: str
    num_ranks: int
    gpus: Mapping[str, str]
    """Numbers of GPUs and ranks, and name, memory, driver and clock of each GPU."""
    settings: Mapping[str, str]
    """Environment variables of communication."""
    versions: Mapping[str, str]
    model: Mapping[str, str]
    """Sampled hash by path, or ``_MISSING``."""
    data: Mapping[str, str]
    disks: Mapping[str, tuple[float, ...] | str]
    """By directory: GB free, GB/s written and read; or the error."""


def check_cluster(
    config: RunConfig, *, network_gb_s: float | None, disk_gb_s: float, free_gb: float | None
) -> list[Diagnosis]:
    """Describe this node and, with all other ranks, measure the network; judge on rank 0.

    Links and collectives must reach ``network_gb_s`` (None: ``NETWORK_FLOORS``), each node's disk
    ``disk_gb_s``, and the space under ``run_dir`` ``free_gb`` (None: two checkpoints).

    Collective over all ranks, which the environment of torchrun describes; empty on all but rank 0.

    Raises:
        ValueError: A collective fails.
    """
    try:
        device, control = init_world(_TIMEOUT_S)
        rank, backend = dist.get_rank(), dist.get_backend()
        is_first = launched_number("LOCAL_RANK", 0) == 0
        described = _gather(_describe_node(config) if is_first else None, control)
        nodes = {node.name: node for node in described if node is not None}
        speeds = dict([*_collectives(control, device), *_links(nodes, control, device)])
    except RuntimeError as error:
        raise ValueError(
            f"a collective failed ({describe_cause(error)}); check NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME, NCCL_IB_HCA and firewalls between the nodes"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank:
        return []
    floor = NETWORK_FLOORS[backend] if network_gb_s is None else network_gb_s
    gpus = {
        node.gpus[key] for node in nodes.values() for key in node.gpus if key.startswith("GPU ")
    }
    text = f"{len(described)} ranks on {_names(nodes)}; {'; '.join(sorted(gpus)) or 'no GPU'}"
    return [
        Diagnosis("nodes", "ok", text),
        *_compare("GPUs" if gpus else "ranks", {name: node.gpus for name, node in nodes.items()}),
        *_compare("settings", {name: node.settings for name, node in nodes.items()}),
        *_compare("versions", {name: node.versions for name, node in nodes.items()}),
        *_compare("model", {name: node.model for name, node in nodes.items()}),
        *_compare("data", {name: nodes[name].data for name in list(nodes)[:1]}),  # of rank 0 alone
        *_judge_disks(nodes, disk_gb_s, free_gb, config),
        *_judge_network(speeds, floor),
        *asyncio.run(_try_servers(config, device)),
    ]


def _describe_node(config: RunConfig) -> Node:
    number, num_ranks = launched_number("GROUP_RANK", 0), launched_number("LOCAL_WORLD_SIZE", 1)
    gpus = {f"GPU {number}": text for number, text in enumerate(_query_gpus())}
    folders = config.models.values()
    files = [file for folder in folders for file in folder.glob("*") if file.is_file()]
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    disks = {  # or the nearest directories above them
        next(place for place in (path, *path.parents) if place.is_dir()).resolve()
        for path in (config.run_dir, config.run_dir / "checkpoints")
    }
    return Node(
        name=f"{socket.gethostname()}[{number}]",
        num_ranks=num_ranks,
        gpus={"GPUs": str(len(gpus)), "ranks": str(num_ranks), **gpus},
        settings=settings | nccl_settings(),
        versions=own_software().settings() | {"NCCL": nccl_version()},
        model={str(path): _identity(path) for path in (*folders, *files)},
        data={str(path): _identity(path) for path in config.files.values()},
        disks={str(path): _measure_disk(path) for path in sorted(disks)},
    )


def _query_gpus() -> list[str]:
    if not count_gpus():
        return []
    query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _identity(path: Path) -> str:
    try:
        return "a directory" if path.is_dir() else sampled_digest([path])[:12]
    except OSError as error:
        return _MISSING if isinstance(error, FileNotFoundError) else describe_os_error(error)


def _measure_disk(directory: Path) -> tuple[float, ...] | str:
    """Write and read a file that vanishes even with a killed process."""
    chunk, num_bytes = os.urandom(_CHUNK_BYTES), 0
    try:
        free = shutil.disk_usage(directory).free
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            started_s = time.perf_counter()
            while num_bytes < _DISK_BYTES and time.perf_counter() - started_s < _DISK_S:
                num_bytes += os.write(file.fileno(), chunk)
            os.fsync(file.fileno())
            written_s = time.perf_counter()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(_CHUNK_BYTES):
                pass
            read_s = time.perf_counter() - written_s
    except OSError as error:
        return describe_os_error(error)
    return tuple(n / 1e9 for n in (free, num_bytes / (written_s - started_s), num_bytes / read_s))


def _gather[T](value: T, control: dist.ProcessGroup) -> list[T]:
    values: list[T] = [value] * control.size()
    dist.all_gather_object(values, value, group=control)
    return values


def _seconds(
    exchange: Callable[[Tensor], object], control: dist.ProcessGroup, device: torch.device
) -> tuple[int, list[float]]:
    """Return the bytes of the largest message that was tried, and its time on each rank."""
    exchange(torch.zeros(1, device=device))  # connects
    num_bytes, times = 0, [0.0]
    for num_bytes in _MESSAGE_BYTES:
        payload = torch.zeros(num_bytes // 4, device=device)
        dist.barrier(group=control)
        started_s = time.perf_counter()
        exchange(payload)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times = _gather(time.perf_counter() - started_s, control)
        if max(times) > _ENOUGH_S:
            break
    return num_bytes, times


def _collectives(
    control: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield GB/s of all_reduce, by the bytes that a rank of a ring sends, and of broadcast."""
    size = control.size()
    if size > 1:
        num_bytes, times = _seconds(dist.all_reduce, control, device)
        yield ("all_reduce",), 2 * (size - 1) / size * num_bytes / max(times) / 1e9
        num_bytes, times = _seconds(partial(dist.broadcast, src=0), control, device)
        yield ("broadcast",), num_bytes / max(times) / 1e9


def _links(
    nodes: Mapping[str, Node], control: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield GB/s between neighbours of the ring of nodes, one pair of nodes after the other.

    Ranks with equal local numbers send to each other, all of a pair at once, since each GPU may
    have a port of its own.
    """
    sizes = [node.num_ranks for node in nodes.values()]
    firsts = list(accumulate(sizes, initial=0))
    names = list(nodes)
    for one, other in pairwise([*range(len(names)), *[0] * (len(names) > 2)]):
        locals_ = range(min(sizes[one], sizes[other]))
        pairs = {firsts[one] + local: firsts[other] + local for local in locals_}
        num_bytes, times = _seconds(partial(_send_and_receive, pairs), control, device)
        slowest_s = max(times[rank] for rank in (*pairs, *pairs.values()))
        yield (names[one], names[other]), 2 * num_bytes / slowest_s / 1e9


def _send_and_receive(pairs: Mapping[int, int], payload: Tensor) -> None:
    """Send a payload to the other rank of a pair and back; do nothing on further ranks."""
    rank = dist.get_rank()
    for source, target in (*pairs.items(), *((b, a) for a, b in pairs.items())):
        if rank == source:
            dist.send(payload, target)
        elif rank == target:
            dist.recv(payload, source)


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more


def _compare(topic: str, nodes: Mapping[str, Mapping[str, str]]) -> Iterator[Diagnosis]:
    """Report each name whose value differs between nodes, or is missing on one."""
    keys = sorted({key for values in nodes.values() for key in values})
    num_equal = len(keys)
    for key in keys:
        holders: dict[str, list[str]] = {}
        for node, values in nodes.items():
            absent = _MISSING if "/" in key else "not set"
            holders.setdefault(values.get(key, absent), []).append(node)
        if len(holders) > 1 or _MISSING in holders:
            num_equal -= 1
            rarest = sorted(holders.items(), key=lambda item: len(item[1]))
            text = "; ".join(f"{value} on {_names(names)}" for value, names in rarest)
            yield Diagnosis(topic, "problem", f"{key}: {text}", "make it the same everywhere")
    yield Diagnosis(topic, "ok", f"{num_equal} of {len(keys)} values are equal on all nodes")


def _judge_disks(
    nodes: Mapping[str, Node], floor: float, free_gb: float | None, config: RunConfig
) -> Iterator[Diagnosis]:
    needed_gb, file = free_gb or 0.0, config.model.path / "config.json"
    if free_gb is None and file.is_file():
        hf = read_hf_config_file(file, config.model.ignored_config_fields)
        bytes_each = OPTIMIZER_BYTES + getattr(torch, config.model.dtype).itemsize
        needed_gb = 2 * bytes_each * model_parameters(hf) / 1e9
    for name, node in nodes.items():
        for directory, disk in node.disks.items():
            if isinstance(disk, str):
                yield Diagnosis("disk", "problem", f"{directory} on {name}: {disk}")
                continue
            there_gb, *rates = disk
            text = (
                f"{directory} on {name}: {there_gb:.2f} GB free, at least {needed_gb:.2f} needed; "
                f"{rates[0]:.2f} GB/s written, {rates[1]:.2f} read, floor {floor:g}"
            )
            if there_gb < needed_gb or min(rates) < floor:
                yield Diagnosis("disk", "problem", text, "free space, or see what is mounted there")
            else:
                yield Diagnosis("disk", "ok", text)


def _judge_network(speeds: Mapping[tuple[str, ...], float], floor: float) -> Iterator[Diagnosis]:
    slow: list[str] = []
    for names, speed in speeds.items():
        text = f"{' – '.join(names)}: {speed:.3g} GB/s, floor {floor:g}"
        if speed < floor:
            slow += names
            yield Diagnosis("network", "problem", text, "see NCCL_IB_HCA and NCCL_SOCKET_IFNAME")
        else:
            yield Diagnosis("network", "ok", text)
    for name in (name for name in dict.fromkeys(slow) if slow.count(name) == 2):
        text = f"{name}: both of its links are below the floor"
        yield Diagnosis("network", "problem", text, "begin with this node")


async def _try_servers(config: RunConfig, device: torch.device) -> list[Diagnosis]:
    """Send one bucket of the model's own weights to each server, as a weight sync does."""
    rollout, shards = config.rollout, sorted(config.model.path.glob("*.safetensors"))
    if rollout.starts_servers or not shards:
        return []
    if rollout.weight_sync.method != "broadcast":
        text = f"not tried: rollout.weight_sync.method is {rollout.weight_sync.method}"
        return [Diagnosis("servers", "note", text)]
    with safe_open(shards[0], "pt") as file:
        name = min(file.keys())
        tensor = file.get_tensor(name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = BucketLayout((name,), (dtype,), (tuple(tensor.shape),))
    flat = tensor.view(-1).view(torch.uint8).to(device)
    findings = []
    backend = load_kind(rollout.engine).open(config, device.type, awaits_weights=True)
    for address in backend.addresses():
        engine = await backend.connect(address)
        try:
            seconds = await _send_bucket(engine, rollout.weight_sync, layout, flat)
            text = f"{address}: {flat.numel() / 1e6:.1f} MB in {seconds:.2f} s"
            findings.append(Diagnosis("servers", "ok", text))
        except RuntimeError as error:  # of the server, or of the group
            findings.append(Diagnosis("servers", "problem", f"{address}: {describe_cause(error)}"))
        finally:
            await engine.close()
    return findings


async def _send_bucket(
    engine: Engine, sync: WeightSyncConfig, layout: BucketLayout, flat: Tensor
) -> float:
    """Form a group with one server and broadcast a bucket; return the seconds of the broadcast."""
    control, properties = engine.weights, await engine.capabilities(_SERVER_S)
    address = rank_zero_address([engine.address], sync.master_address)
    backend = choose_backend(sync.backend, flat.device, [engine.address])
    group = WeightGroup(address, backend, 1 + properties.num_ranks, _SERVER_S)
    try:
        await control.open_session(_SERVER_S)
        place = replace(group.place, first_rank=1)
        joined = control.join_group(place, _SERVER_S)
        await asyncio.gather(joined, asyncio.wrap_future(group.form()))
        started_s = time.perf_counter()
        received = control.receive(layout, place.name, version=None, timeout_s=_SERVER_S)
        await asyncio.gather(received, asyncio.wrap_future(group.broadcast(flat)))
        seconds = time.perf_counter() - started_s
        await control.leave_group(place.name, _SERVER_S)
        await control.close_session(_SERVER_S)
    finally:
        group.close()
    return seconds
