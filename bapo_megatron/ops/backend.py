"""Selects the implementation of the kernels.

``Kernels`` are nine functions on tensors, documented in csrc/README.md: the extension's for CPU and
CUDA, or ``reference``, whose signatures and docstrings hold for both.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from bapo_megatron.ops import extension
from bapo_megatron.ops.reference import KERNELS as REFERENCE
from bapo_megatron.ops.reference import ReferenceKernels

Backend = Literal["auto", "cpu", "cuda", "reference"]

logger = logging.getLogger(__name__)

_NO_CUDA = (
    "the extension was built without CUDA; install nvcc (or set CUDA_HOME) and run "
    "`pip install --no-build-isolation -e .` again"
)


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """``torch.ops.bapo`` itself; the dispatcher picks the version for the tensors' device.

    It never waits for the device. Arguments that do not fit are refused with a RuntimeError that
    names argument, rule and value.
    """

    name: str
    """``cpu`` or ``cuda``."""

    logprob_partials: ClassVar[Any] = staticmethod(torch.ops.bapo.logprob_partials)
    logprob_combine: ClassVar[Any] = staticmethod(torch.ops.bapo.logprob_combine)
    logits_backward_: ClassVar[Any] = staticmethod(torch.ops.bapo.logits_backward_)
    kl_partials: ClassVar[Any] = staticmethod(torch.ops.bapo.kl_partials)
    kl_combine: ClassVar[Any] = staticmethod(torch.ops.bapo.kl_combine)
    kl_backward_: ClassVar[Any] = staticmethod(torch.ops.bapo.kl_backward_)
    contributions_: ClassVar[Any] = staticmethod(torch.ops.bapo.contributions_)
    search_bounds: ClassVar[Any] = staticmethod(torch.ops.bapo.search_bounds)
    importance_ratio: ClassVar[Any] = staticmethod(torch.ops.bapo.importance_ratio)


Kernels = CompiledKernels | ReferenceKernels

CPU_KERNELS, CUDA_KERNELS = CompiledKernels("cpu"), CompiledKernels("cuda")


def select_kernels(name: Backend, device: torch.device) -> Kernels:
    """Return the kernels that ``ops.backend`` asks for, for tensors on ``device``.

    ``auto`` takes the compiled ones, or the reference on a GPU for which none were built.

    Raises:
        ValueError: The named kernels do not exist for this device or in this build.
    """
    if name == "auto":
        return _choose(device.type)
    if name == "reference":
        return REFERENCE
    if name != device.type:
        raise ValueError(
            f"ops.backend: {name} needs tensors on that device, but they are on {device.type}; "
            "set ops.backend: auto"
        )
    if name == "cuda" and not extension.build_info()["cuda"]:
        raise ValueError(f"ops.backend: cuda was asked for, but {_NO_CUDA}")
    return CUDA_KERNELS if name == "cuda" else CPU_KERNELS


@functools.cache
def _choose(device_type: str) -> Kernels:
    """Choose for ``auto``; logged once per device type."""
    if device_type == "cuda" and not extension.build_info()["cuda"]:
        logger.warning("ops.backend: auto runs the slow reference on cuda: %s", _NO_CUDA)
        return REFERENCE
    logger.info("ops.backend: auto runs the compiled %s kernels", device_type)
    return CUDA_KERNELS if device_type == "cuda" else CPU_KERNELS
