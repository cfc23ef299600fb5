"""The share of the speed of GPUs (``gpus``) and links that a plan assumes.

Every figure that a plan rests on is a field of ``Assumptions`` and is printed with it. Units: bytes
(1 GB = 10⁹), seconds, floating-point operations.
"""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["transformer-engine", "local"]
"""The two kinds of layers (``policy.layer_spec``) keep different activations."""

Placement = Literal["colocated", "same node", "elsewhere"]
"""Servers on the trainer's GPUs (``rollout.colocated``), on others of rank 0's node
(``rollout.server.first_gpu``), or on other nodes."""


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
    miss_share: float
    """Share of the predicted bounds that are wrong, of which each costs a loss pass."""
    placement: Placement
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
