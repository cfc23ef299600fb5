"""The kernels in readable PyTorch: the specification to read, and the oracle to check against.

Log-probs, gradients and ratios take float64 too, and then compute in float64. The contribution
table and the search are exact integers, for which one implementation is enough: the compiled one,
on the CPU.

A row's columns of this rank are reduced to m = max x, s = Σ e^d and t = Σ e^d · d with
d = (x − m) / temperature, and x_y; m and x_y are raw logits. Over the ranks, with
d_i = (m_i − M) / temperature, a_i = e^d_i, S = Σ a_i s_i and U = Σ a_i (t_i + d_i s_i):

    log-prob = (x_y − M) / temperature − log S,     entropy = log S − U / S.

Shape legend: N = rows of the logits, V = local columns, T = tokens, C = tokens of a chunk, P =
ranks of the tensor-parallel group.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.ops import extension  # noqa: F401  (registers the operations)

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in float32 at a time: 64 MB."""

LOG_RATIO_LIMIT = 20.0
"""|ℓ − μ| is clamped to this before the exponential, as in csrc/common/contribution.h."""


@dataclass(frozen=True, slots=True)
class ReferenceKernels:
    """The operations of the loss stage, on any device; some wait for it."""

    name: str = "reference"

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
        outside_T = _outside(logits, rows, target, vocab_size)
        partials_T4 = torch.zeros(
            target.numel(), 4, dtype=_compute_dtype(logits), device=logits.device
        )
        for chunk, raw_CV in _chunks(logits, rows, target.numel(), vocab_size - vocab_start):
            max_C, sum_C, weighted_C, target_C = partials_T4[chunk].unbind(dim=1)
            owned_C, local_C = _locate(target[chunk], vocab_start, raw_CV.shape[1])
            target_C.copy_(torch.where(owned_C, raw_CV.gather(1, local_C[:, None])[:, 0], 0))
            max_C.copy_(raw_CV.amax(dim=1))
            # A row of −inf alone (all padding) keeps m = −inf and s = 0: shift it by 0 instead.
            shift_C = torch.where(max_C == -math.inf, 0, max_C)
            scaled_CV = raw_CV.sub_(shift_C[:, None]).div_(temperature)
            exp_CV = scaled_CV.exp()
            sum_C.copy_(exp_CV.sum(dim=1))
            weighted_C.copy_((exp_CV * scaled_CV.masked_fill_(exp_CV == 0, 0.0)).sum(dim=1))
        return partials_T4.masked_fill_(outside_T[:, None], math.nan)

    def logprob_combine(
        self, partials: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Merge partials [P, T, 4] to log-prob, entropy, M and log S, each [T]."""
        max_PT, sum_PT, weighted_PT, target_PT = partials.double().unbind(dim=2)
        max_T = max_PT.amax(dim=0)
        shift_PT = torch.where(max_PT == -math.inf, -math.inf, (max_PT - max_T) / temperature)
        alpha_PT = shift_PT.exp()
        shift_PT = torch.where(max_PT == -math.inf, 0, shift_PT)
        total_T = (alpha_PT * sum_PT).sum(dim=0)
        weighted_T = (alpha_PT * (weighted_PT + shift_PT * sum_PT)).sum(dim=0)
        log_sum_T = total_T.log()
        logprob_T = (target_PT.sum(dim=0) - max_T) / temperature - log_sum_T
        entropy_T = log_sum_T - weighted_T / total_T
        # A poisoned row, or one without true columns: all four become NaN.
        poisoned_T = ~torch.isfinite(log_sum_T)
        logprob_T, entropy_T, max_T, log_sum_T = (
            values_T.masked_fill(poisoned_T, math.nan).to(partials.dtype)
            for values_T in (logprob_T, entropy_T, max_T, log_sum_T)
        )
        return logprob_T, entropy_T, max_T, log_sum_T

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
        rows_T = torch.arange(target.numel(), device=target.device) if rows is None else rows
        grad_logprob_T = torch.zeros_like(log_sum) if grad_logprob is None else grad_logprob
        grad_entropy_T = torch.zeros_like(log_sum) if grad_entropy is None else grad_entropy
        _outside(logits, rows_T, target, vocab_size)
        if bool((rows_T.sort().values.diff() == 0).any()):
            raise RuntimeError("rows must select each row at most once, got a row twice")
        for chunk, raw_CV in _chunks(logits, rows_T, target.numel(), vocab_size - vocab_start):
            scaled_CV = raw_CV.sub_(max[chunk, None]).div_(temperature)
            log_prob_CV = scaled_CV.sub_(log_sum[chunk, None])
            prob_CV = log_prob_CV.exp()
            # A column with p = 0 has log p = −inf; its term tends to 0.
            from_mean_CV = (log_prob_CV + entropy[chunk, None]).masked_fill_(prob_CV == 0, 0)
            grad_logprob_C, grad_entropy_C = grad_logprob_T[chunk], grad_entropy_T[chunk]
            factor_CV = grad_logprob_C[:, None] + grad_entropy_C[:, None] * from_mean_CV
            grad_CV = -prob_CV * factor_CV
            owned_C, local_C = _locate(target[chunk], vocab_start, grad_CV.shape[1])
            at_target_C = torch.where(owned_C, grad_logprob_C, 0).to(grad_CV.dtype)
            grad_CV.scatter_add_(1, local_C[:, None], at_target_C[:, None])
            grad_CV.div_(temperature)
            # A token without a gradient gets zeros, whatever its logits hold.
            idle_C = (grad_logprob_C == 0) & (grad_entropy_C == 0)
            grad_CV.masked_fill_(idle_C[:, None], 0.0)
            _padding(grad_CV, vocab_size - vocab_start).fill_(0.0)
            logits.index_copy_(0, rows_T[chunk], grad_CV.to(logits.dtype))
        unselected_N = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        unselected_N[rows_T] = False
        logits.masked_fill_(unselected_N[:, None], 0.0)

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
        """Add tokens [T] to the contribution table, in place."""
        total = table.cpu()
        arrays = (logprob.cpu(), behaviour_logprob.cpu(), advantage.cpu(), mask.cpu())
        torch.ops.bapo.contributions_(total, grid, *arrays, weight)
        table.copy_(total)

    def search_bounds(
        self, table: Tensor, grid: Tensor, target: float, contribution: str, measure: str
    ) -> Tensor:
        """Choose the bounds: float64 [8] on the table's device."""
        bounds: Tensor = torch.ops.bapo.search_bounds(
            table.cpu(), grid, target, contribution, measure
        )
        return bounds.to(table.device)

    def importance_ratio(self, logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
        """Return r = exp(clamp(ℓ − μ, ±20)), [T]; NaN where ℓ or μ is not finite."""
        finite_T = logprob.isfinite() & behaviour_logprob.isfinite()
        difference_T = (logprob - behaviour_logprob).double()
        ratio_T = difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(logprob.dtype)
        return torch.where(finite_T, ratio_T, math.nan)


KERNELS = ReferenceKernels()


def _chunks(
    logits_NV: Tensor, rows_T: Tensor | None, num_tokens: int, num_true: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens with a copy of their logits, padding set to −inf."""
    chunk_tokens = max(1, CHUNK_ELEMENTS // logits_NV.shape[1])
    for begin in range(0, num_tokens, chunk_tokens):
        chunk = slice(begin, min(begin + chunk_tokens, num_tokens))
        if rows_T is None:
            selected_CV = logits_NV[chunk]
        else:
            selected_CV = logits_NV.index_select(0, rows_T[chunk].clamp(0, len(logits_NV) - 1))
        raw_CV = selected_CV.to(_compute_dtype(logits_NV), copy=True)
        _padding(raw_CV, num_true).fill_(-math.inf)
        yield chunk, raw_CV


def _padding(values_CV: Tensor, num_true: int) -> Tensor:
    """View the columns beyond the vocabulary, which has ``num_true`` from here on."""
    return values_CV[:, max(num_true, 0) :]


def _outside(logits_NV: Tensor, rows_T: Tensor | None, target_T: Tensor, vocab_size: int) -> Tensor:
    """Mark targets and rows out of range; on the CPU, where checking costs no wait, refuse them."""
    outside_T = (target_T < 0) | (target_T >= vocab_size)
    if not logits_NV.is_cuda and bool(outside_T.any()):
        raise RuntimeError(
            f"target must lie in [0, vocab_size) = [0, {vocab_size}), got "
            f"{int(target_T[outside_T][0])}"
        )
    if rows_T is None:
        return outside_T
    no_row_T = (rows_T < 0) | (rows_T >= len(logits_NV))
    if not logits_NV.is_cuda and bool(no_row_T.any()):
        raise RuntimeError(
            f"rows must lie in [0, N) = [0, {len(logits_NV)}), got {int(rows_T[no_row_T][0])}"
        )
    return outside_T | no_row_T


def _locate(target_C: Tensor, vocab_start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in this rank's columns, and the local column of each (clamped)."""
    local_C = target_C - vocab_start
    owned_C = (local_C >= 0) & (local_C < num_columns)
    return owned_C, local_C.clamp(0, num_columns - 1)


def _compute_dtype(logits_NV: Tensor) -> torch.dtype:
    return torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
