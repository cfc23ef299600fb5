"""The extension's kernels as ``Kernels``: ``torch.ops.bapo`` for tensors on one kind of device."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bapo_megatron.ops import extension  # noqa: F401  (registers the operations)


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """``torch.ops.bapo`` itself; the dispatcher takes the version of the tensors' device.

    Arguments that do not fit are refused by the operations with a RuntimeError that names argument,
    rule and value.
    """

    name: str
    """``cpu`` or ``cuda``."""

    logprob_partials: ClassVar[Any] = staticmethod(torch.ops.bapo.logprob_partials)
    logprob_combine: ClassVar[Any] = staticmethod(torch.ops.bapo.logprob_combine)
    logits_backward_: ClassVar[Any] = staticmethod(torch.ops.bapo.logits_backward_)
    accumulate: ClassVar[Any] = staticmethod(torch.ops.bapo.contributions_)
    search_bounds: ClassVar[Any] = staticmethod(torch.ops.bapo.search_bounds)
    importance_ratio: ClassVar[Any] = staticmethod(torch.ops.bapo.importance_ratio)


CPU = CompiledKernels("cpu")
CUDA = CompiledKernels("cuda")
