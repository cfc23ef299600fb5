"""The speed of GPUs and links, and the share of it that a plan assumes.

Every figure that a plan rests on is a field of ``Assumptions`` and is printed with it. Units: bytes
(1 GB = 10⁹), seconds, floating-point operations.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["transformer-engine", "local"]
"""The two kinds of layers (``policy.layer_spec``) keep different activations."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, as its data sheet has it: dense products, one direction of a link."""

    name: str
    memory_gb: float
    bfloat16_flops: float
    """Operations per second."""
    float32_flops: float
    """Without TF32."""
    fp8_flops: float
    """0: it has none."""
    memory_bytes_per_s: float
    node_link_bytes_per_s: float
    """NVLink, to the other GPUs of the node."""
    network_bytes_per_s: float
    """One GPU's share of the node's network: a 200 or 400 Gbit/s port each."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80, 312e12, 19.5e12, 0, 2.04e12, 300e9, 25e9),
        Gpu("H100", 80, 989e12, 67e12, 1979e12, 3.35e12, 450e9, 50e9),
        Gpu("H200", 141, 989e12, 67e12, 1979e12, 4.8e12, 450e9, 50e9),
        Gpu("B200", 180, 2250e12, 80e12, 4500e12, 8.0e12, 900e9, 50e9),
    )
}
"""NVIDIA's SXM parts (data sheets of 2020, 2022, 2023 and 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Everything that a plan assumes; the options of the command change it."""

    gpu: str
    gpu_memory_bytes: float
    reserve_bytes: float = 5e9
    """Kept free for the CUDA context, NCCL's buffers, library workspaces and fragmentation."""
    layers: LayerKind
    peak_flops: float
    """Operations per second of one GPU in the run's number format."""
    mfu_share: float
    """Model FLOP/s over peak, for the matrix products and attention alone: bubbles and messages
    come on top."""
    memory_bytes_per_s: float
    memory_share: float = 0.7
    """Share of the memory bandwidth that the optimizer and decoding reach."""
    node_gpus: int
    node_link_bytes_per_s: float
    network_bytes_per_s: float
    link_share: float = 0.7
    """Share of a link's bandwidth that messages reach."""
    disk_bytes_per_s: float = 2e9
    """Bandwidth of the shared file system, each way, for the whole run."""
    prompt_tokens: int
    """Mean."""
    response_tokens: int
    """Mean; lengths are taken to be uniform between 0 and twice this."""
    rollout_gpus: int
    rollout_tokens_per_s: float | None
    """Rate of one rollout GPU; None: estimated from memory bandwidth and ``mfu_share``."""

    @property
    def usable_bytes(self) -> float:
        """Memory of one GPU without the reserve."""
        return self.gpu_memory_bytes - self.reserve_bytes

    @property
    def reached_flops(self) -> float:
        """Operations per second of one GPU."""
        return self.peak_flops * self.mfu_share

    @property
    def reached_memory_bytes_per_s(self) -> float:
        """Bandwidth of one GPU's memory."""
        return self.memory_bytes_per_s * self.memory_share

    def link_bytes_per_s(self, *, within_node: bool) -> float:
        """Bandwidth that one GPU reaches, one direction."""
        link = self.node_link_bytes_per_s if within_node else self.network_bytes_per_s
        return link * self.link_share


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name, in any case.

    Raises:
        ValueError: It is not in the table.
    """
    found = GPUS.get(name.upper())
    if found is None:
        near = difflib.get_close_matches(name.upper(), GPUS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"--gpu: must be one of {', '.join(GPUS)}, got '{name}'; {hint}take the nearest, "
            "and give --gpu-memory and --mfu"
        )
    return found


def peak_flops(gpu: Gpu, dtype: str, fp8: str) -> float:
    """Return a GPU's operations per second with ``model.dtype`` and ``megatron.fp8``.

    Raises:
        ValueError: The GPU has no such format.
    """
    if fp8 == "none":
        return gpu.bfloat16_flops if dtype == "bfloat16" else gpu.float32_flops
    if not gpu.fp8_flops:
        raise ValueError(
            f"megatron.fp8: {fp8} needs 8-bit products, which {gpu.name} has not; "
            "set megatron.fp8=none"
        )
    return gpu.fp8_flops
