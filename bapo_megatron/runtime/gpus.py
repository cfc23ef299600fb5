"""The GPUs of this machine, and data-sheet speeds of GPU models."""

import re
from dataclasses import dataclass
from pathlib import Path

MAX_GPUS = 1 << 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model's data sheet: dense operations, one direction of a link."""

    name: str
    memory_gb: float
    bfloat16_flops: float
    """Operations per second."""
    float32_flops: float
    """Without TF32."""
    fp8_flops: float
    """0: not supported."""
    memory_bytes_per_s: float
    node_link_bytes_per_s: float
    """NVLink, or PCIe where there is none, to the other GPUs of the node."""
    network_bytes_per_s: float
    """Network of one GPU: a 200 or 400 Gbit/s port."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("RTX4090", 24, 165e12, 82.6e12, 330e12, 1.01e12, 32e9, 25e9),
        Gpu("L40S", 48, 362e12, 91.6e12, 733e12, 0.864e12, 32e9, 25e9),
        Gpu("A100", 80, 312e12, 19.5e12, 0, 2.04e12, 300e9, 25e9),
        Gpu("H100", 80, 989e12, 67e12, 1979e12, 3.35e12, 450e9, 50e9),
        Gpu("H200", 141, 989e12, 67e12, 1979e12, 4.8e12, 450e9, 50e9),
        Gpu("B200", 180, 2250e12, 80e12, 4500e12, 8.0e12, 900e9, 50e9),
    )
}
"""NVIDIA's SXM parts, and two cards with PCIe 4.0 x16 (data sheets of 2020 to 2024)."""


def count_gpus() -> int:
    """Return the number of GPUs visible to CUDA; 0 without a driver, without importing torch."""
    if not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def find_gpu(name: str) -> Gpu:
    """Return the GPU model of this name, in upper or lower case.

    Raises:
        ValueError: It is not in the table.
    """
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise ValueError(
            f"--gpu: must be one of {', '.join(GPUS)}, got '{name}'; take the nearest, and give "
            "--gpu-memory and --mfu"
        )
    return gpu


def recognize_gpu(device_name: str) -> Gpu | None:
    """Return the GPU model that CUDA names, such as ``NVIDIA H100 80GB HBM3``, if known.

    PCIe and NVL cards share the names of the SXM parts, but are slower.
    """
    words = re.split(r"[ -]", device_name.replace("RTX 4090", "RTX4090"))
    if {"PCIe", "PCIE", "NVL"} & set(words):
        return None
    return next((GPUS[word] for word in words if word in GPUS), None)


def peak_flops(gpu: Gpu, dtype: str, fp8: str) -> float:
    """Return a GPU's peak FLOPS with ``model.dtype`` and ``megatron.fp8``.

    Raises:
        ValueError: The GPU does not support FP8.
    """
    if fp8 == "none":
        return gpu.bfloat16_flops if dtype == "bfloat16" else gpu.float32_flops
    if not gpu.fp8_flops:
        raise ValueError(
            f"megatron.fp8: {fp8} requires FP8, which {gpu.name} does not support; set "
            "megatron.fp8=none"
        )
    return gpu.fp8_flops
