"""What a step costs: time and memory of every rank, and the share of the GPUs' peak."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.runtime.distributed import ProcessGroups, gather_objects
from bapo_megatron.runtime.gpus import peak_flops, recognize_gpu
from bapo_megatron.telemetry.console import say

_TIME = "time/"


def find_peak_flops(config: RunConfig, groups: ProcessGroups) -> float | None:
    """Return the operations per second of all ranks' GPUs, the same for each; None on a CPU.

    Also None for a GPU that is not known, which rank 0 says.
    """
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops * 1e12 * groups.world_size
    if groups.device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(groups.device)
    gpu = recognize_gpu(name)
    if gpu is None:
        if groups.rank == 0:
            say(f"the peak of '{name}' is not known: set log.peak_tflops for throughput/mfu_share")
        return None
    return groups.world_size * peak_flops(gpu, config.model.dtype, config.megatron.fp8)


def cost_metrics(
    values: Mapping[str, float], groups: ProcessGroups, peak: float | None
) -> dict[str, float]:
    """Return the metrics that follow from a step's ``values`` of each rank; {} but on rank 0.

    A collective of all ranks, which have the same phases.
    """
    own = {n.removeprefix(_TIME): s for n, s in values.items() if n.startswith(_TIME)}
    own |= _memory(groups.device)
    told = gather_objects(list(own.values()), groups)
    if told is None:
        return {}
    gathered = torch.tensor(told, dtype=torch.float64)
    costs: dict[str, float] = {}
    reduced = {"min": gathered.amin(0), "mean": gathered.mean(0), "max": gathered.amax(0)}
    for how, numbers in reduced.items():
        costs |= {f"ranks/{name}_{how}": x for name, x in zip(own, numbers.tolist(), strict=True)}
    training_s = costs["ranks/training_s_max"]
    costs["throughput/trained_tokens_per_s"] = values["train/trained_tokens"] / training_s
    if peak is not None:
        flops = values["train/forward_only_flops"] + values["train/forward_backward_flops"]
        costs["throughput/mfu_share"] = flops / (training_s * peak)
    return costs


def _memory(device: torch.device) -> dict[str, float]:
    """Return this process's memory now and, on a GPU, its peaks since the last call, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = {"host_bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}
    if device.type == "cuda":
        memory["cuda_allocated_bytes"] = float(torch.cuda.max_memory_allocated(device))
        memory["cuda_reserved_bytes"] = float(torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
    return memory
