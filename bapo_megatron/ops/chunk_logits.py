"""The language-model head, and how it makes the logits of one chunk of tokens.

Shape legend: N = rows of the hidden states over all ranks, M = rows of this rank (N, or N over the
ranks under sequence parallelism), H = hidden size, V = local vocabulary columns, T = response
tokens, C = tokens of a chunk, P = ranks of the tensor-parallel group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.ops.backend import Kernels

HIDDEN_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """The language-model head on one rank of a tensor-parallel group."""

    weight: Tensor
    """[V, H] this rank's rows of the (padded) vocabulary. Where Megatron's data parallelism has
    given it a ``main_grad``, gradients are added there."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks that share the vocabulary; None: this rank holds all of it."""
    sequence_parallel: bool = False
    """Whether each rank of the group holds its own part of the hidden states' rows."""

    @property
    def num_ranks(self) -> int:
        """P."""
        return 1 if self.tensor_group is None else dist.get_world_size(self.tensor_group)

    @property
    def vocab_start(self) -> int:
        """Vocabulary id of this rank's first row."""
        rank = 0 if self.tensor_group is None else dist.get_rank(self.tensor_group)
        return rank * self.weight.shape[0]

    def gather_rows(self, hidden_MH: Tensor) -> Tensor:
        """Return the hidden states [N, H] of all ranks."""
        if not self.sequence_parallel or self.num_ranks == 1:
            return hidden_MH
        num_rows, hidden_size = hidden_MH.shape
        hidden_NH = hidden_MH.new_empty(num_rows * self.num_ranks, hidden_size)
        dist.all_gather_into_tensor(hidden_NH, hidden_MH.contiguous(), group=self.tensor_group)
        return hidden_NH

    def sum_over_ranks(self, grad_NH: Tensor) -> Tensor:
        """Add up what the ranks' columns contribute; returns this rank's rows [M, H]."""
        if self.num_ranks == 1:
            return grad_NH
        if not self.sequence_parallel:
            dist.all_reduce(grad_NH, group=self.tensor_group)
            return grad_NH
        grad_MH = grad_NH.new_empty(grad_NH.shape[0] // self.num_ranks, grad_NH.shape[1])
        dist.reduce_scatter_tensor(grad_MH, grad_NH, group=self.tensor_group)
        return grad_MH


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLogits:
    """How the logits of a chunk are made, read and turned into their gradient."""

    head: OutputHead
    vocab_size: int
    temperature: float
    chunk_tokens: int
    kernels: Kernels

    def new_buffer(self, target_T: Tensor) -> Tensor:
        """Room for the logits of any chunk: one allocation for all of them."""
        weight_VH = self.head.weight
        return weight_VH.new_empty(min(self.chunk_tokens, len(target_T)), weight_VH.shape[0])

    def compute(self, hidden_CH: Tensor, buffer_CV: Tensor) -> Tensor:
        """Return the logits of a chunk, in the model's dtype, in the buffer."""
        weight_HV = self.head.weight.detach().t()
        return torch.mm(hidden_CH, weight_HV, out=buffer_CV[: len(hidden_CH)])

    def partials(self, logits_CV: Tensor, target_C: Tensor) -> Tensor:
        """Reduce this rank's columns to [C, 4]."""
        return self.kernels.logprob_partials(
            logits_CV, None, target_C, self.head.vocab_start, self.vocab_size, self.temperature
        )

    def combine(self, partials_C4: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Exchange partials between the ranks; returns log-prob, entropy, M and log S [C]."""
        num_tokens, num_ranks = len(partials_C4), self.head.num_ranks
        gathered = partials_C4
        if num_ranks > 1:
            gathered = partials_C4.new_empty(num_ranks * num_tokens, 4)  # gloo takes no [P, C, 4]
            dist.all_gather_into_tensor(gathered, partials_C4, group=self.head.tensor_group)
        partials_PC4 = gathered.view(num_ranks, num_tokens, 4)
        return self.kernels.logprob_combine(partials_PC4, self.temperature)

    def backward_(
        self,
        logits_CV: Tensor,
        target_C: Tensor,
        combined: tuple[Tensor, Tensor, Tensor, Tensor],
        grad_logprob_C: Tensor,
        grad_entropy_C: Tensor | None,
    ) -> None:
        """Overwrite the logits with their gradient."""
        _, entropy_C, max_C, log_sum_C = combined
        self.kernels.logits_backward_(
            logits_CV,
            None,
            target_C,
            max_C,
            log_sum_C,
            entropy_C,
            grad_logprob_C,
            grad_entropy_C,
            self.head.vocab_start,
            self.vocab_size,
            self.temperature,
        )

    def check(self, hidden_MH: Tensor, target_T: Tensor, rows_T: Tensor) -> None:
        """Raise ValueError where these and the settings do not fit together."""
        weight_VH = self.head.weight
        if hidden_MH.dim() != 2 or hidden_MH.dtype not in HIDDEN_TYPES:
            raise ValueError(
                "hidden states must be float32, bfloat16 or float16 of shape [N, H], got "
                f"{hidden_MH.dtype} {list(hidden_MH.shape)}; drop the batch dimension"
            )
        if weight_VH.dtype != hidden_MH.dtype or weight_VH.shape[1:] != hidden_MH.shape[1:]:
            raise ValueError(
                f"the head must be {hidden_MH.dtype} of shape [V, {hidden_MH.shape[1]}] to fit the "
                f"hidden states, got {weight_VH.dtype} {list(weight_VH.shape)}"
            )
        main_grad = getattr(weight_VH, "main_grad", None)
        if main_grad is not None and main_grad.dtype != torch.float32:
            raise ValueError(
                f"the head's main_grad must be float32, got {main_grad.dtype}; set "
                "grad_reduce_in_fp32=True in Megatron's DistributedDataParallelConfig"
            )
        for name, index_T in (("target", target_T), ("rows", rows_T)):
            if (
                index_T.shape != target_T.shape
                or index_T.dim() != 1
                or index_T.dtype != torch.int64
            ):
                raise ValueError(
                    f"{name} must be int64 of shape [T], one per token, got {index_T.dtype} "
                    f"{list(index_T.shape)}"
                )
        num_columns = weight_VH.shape[0] * self.head.num_ranks
        if not 0 < self.vocab_size <= num_columns:
            raise ValueError(
                f"vocab_size must lie in 1 … {num_columns} (rows of the head × ranks), got "
                f"{self.vocab_size}; pass the vocabulary size without padding"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be > 0 and finite, got {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
