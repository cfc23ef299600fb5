"""Which implementation of the kernels runs.

``Kernels`` is the one interface: six functions on tensors, documented in csrc/README.md.
``compiled`` has the extension's CPU and CUDA versions of it, ``reference`` a readable one.

Shape legend: N = rows of the logits, V = local columns, T = tokens, P = ranks of the
tensor-parallel group.
"""

import functools
import logging
from typing import Literal, Protocol

import torch
from torch import Tensor

from bapo_megatron.ops import compiled, extension, reference

Backend = Literal["auto", "cpu", "cuda", "reference"]

logger = logging.getLogger(__name__)

_NO_CUDA = (
    "the extension was built without CUDA; install nvcc (or set CUDA_HOME) and run "
    "`pip install --no-build-isolation -e .` again"
)


class Kernels(Protocol):
    """The operations of the loss stage. The compiled ones never wait for the device."""

    @property
    def name(self) -> str:
        """``cpu``, ``cuda`` or ``reference``."""
        ...

    def logprob_partials(
        self,
        logits: Tensor,
        rows: Tensor | None,
        target: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
    ) -> Tensor:
        """Reduce this rank's columns of each token's row to [T, 4]: m, s, t and x_y."""
        ...

    def logprob_combine(
        self, partials: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Merge partials [P, T, 4] to log-prob, entropy, M and log S, each [T]."""
        ...

    def logits_backward_(
        self,
        logits: Tensor,
        rows: Tensor | None,
        target: Tensor,
        max: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
    ) -> None:
        """Overwrite the logits [N, V] with their gradient."""
        ...

    def accumulate(
        self,
        table: Tensor,
        grid: Tensor,
        logprob: Tensor,
        behaviour_logprob: Tensor,
        advantage: Tensor,
        mask: Tensor,
        weight: str,
    ) -> None:
        """Add tokens [T] to the contribution table, in place (csrc: ``contributions_``)."""
        ...

    def search_bounds(
        self, table: Tensor, grid: Tensor, target: float, contribution: str, measure: str
    ) -> Tensor:
        """Choose the bounds: float64 [8] on the table's device."""
        ...

    def importance_ratio(self, logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
        """Return r = exp(clamp(ℓ − μ, ±20)), [T]; NaN where ℓ or μ is not finite."""
        ...


def select_kernels(name: Backend, device: torch.device) -> Kernels:
    """Return the kernels that ``ops.backend`` asks for.

    Args:
        name: ``auto`` takes the compiled kernels of the device, or the reference on a GPU for which
            none were built (with a warning).
        device: Where the tensors are.

    Raises:
        ValueError: Kernels were asked for by name that this device or this build does not have.
    """
    if name == "auto":
        return _choose(device.type)
    if name == "reference":
        return reference.KERNELS
    if name != device.type:
        raise ValueError(
            f"ops.backend: {name} needs tensors on that device, but they are on {device.type}; "
            "set ops.backend: auto"
        )
    if name == "cuda" and not extension.build_info()["cuda"]:
        raise ValueError(f"ops.backend: cuda was asked for, but {_NO_CUDA}")
    return compiled.CUDA if name == "cuda" else compiled.CPU


@functools.cache
def _choose(device_type: str) -> Kernels:
    """The choice of ``auto``, made and reported once per kind of device."""
    kernels: Kernels
    if device_type == "cpu":
        kernels = compiled.CPU
    elif device_type == "cuda" and extension.build_info()["cuda"]:
        kernels = compiled.CUDA
    else:
        logger.warning("ops.backend: auto runs the slow reference on %s: %s", device_type, _NO_CUDA)
        return reference.KERNELS
    logger.info("ops.backend: auto runs the compiled %s kernels", kernels.name)
    return kernels
