"""The extension's kernels as ``Kernels``: ``torch.ops.bapo`` for tensors on one kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.ops import extension  # noqa: F401  (registers the operations)

_OPS = torch.ops.bapo


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """``torch.ops.bapo``; the dispatcher takes the version of the tensors' device.

    Arguments that do not fit are refused by the ops with a RuntimeError that names argument, rule
    and value.
    """

    name: str
    """``cpu`` or ``cuda``."""

    def logprob_partials(
        self,
        logits: Tensor,
        rows: Tensor | None,
        target: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
    ) -> Tensor:
        """See ``Kernels``."""
        partials: Tensor = _OPS.logprob_partials(
            logits, rows, target, vocab_start, vocab_size, temperature
        )
        return partials

    def logprob_combine(
        self, partials: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See ``Kernels``."""
        logprob, entropy, maximum, log_sum = _OPS.logprob_combine(partials, temperature)
        return logprob, entropy, maximum, log_sum

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
        """See ``Kernels``."""
        _OPS.logits_backward_(
            logits,
            rows,
            target,
            max,
            log_sum,
            entropy,
            grad_logprob,
            grad_entropy,
            vocab_start,
            vocab_size,
            temperature,
        )

    def contributions_(
        self,
        table: Tensor,
        grid: Tensor,
        logprob: Tensor,
        behaviour_logprob: Tensor,
        advantage: Tensor,
        mask: Tensor,
        weight: str,
    ) -> None:
        """See ``Kernels``."""
        _OPS.contributions_(table, grid, logprob, behaviour_logprob, advantage, mask, weight)

    def search_bounds(
        self, table: Tensor, grid: Tensor, target: float, contribution: str, measure: str
    ) -> Tensor:
        """See ``Kernels``."""
        bounds: Tensor = _OPS.search_bounds(table, grid, target, contribution, measure)
        return bounds

    def policy_loss(
        self,
        logprob: Tensor,
        entropy: Tensor | None,
        behaviour_logprob: Tensor,
        advantage: Tensor,
        mask: Tensor,
        weight: Tensor,
        bounds: Tensor,
        dual_clip: float | None,
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        sums, coefficient = _OPS.policy_loss(
            logprob, entropy, behaviour_logprob, advantage, mask, weight, bounds, dual_clip
        )
        return sums, coefficient


CPU = CompiledKernels("cpu")
CUDA = CompiledKernels("cuda")
