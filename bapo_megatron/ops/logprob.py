"""Log-prob and entropy of response tokens over vocabulary-sharded logits.

Each rank of the tensor-parallel group holds the columns [V · rank, V · (rank + 1)) of the padded
vocabulary. A rank reduces its columns to four numbers per token,

    m = max x,  s = Σ e^(x − m),  t = Σ e^(x − m) · (x − m),  x_y,      x = logits / temperature,

one all-gather of [T, 4] exchanges them, and every rank merges them in rank order:

    M = max m_i,  S = Σ α_i s_i,  U = Σ α_i (t_i + (m_i − M) s_i),      α_i = e^(m_i − M),
    log-prob = (x_y − M) − log S,   entropy = log S − U / S.

M and log S stay apart because their sum, rounded once, loses too much at large logits. The backward
needs no collective. Rows are walked in chunks, so that beyond the logits and their gradient only a
chunk is ever held in float32.

Shape legend: N = rows of the logits, V = local columns, T = response tokens, C = tokens of a chunk,
P = ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""Logits per chunk: 64 MB in float32."""

MAX, SUM, WEIGHTED, TARGET = range(4)
"""Columns of the partials: m, s, t and x_y."""


class TokenLogprobs(NamedTuple):
    """What the policy says about each response token."""

    logprob_T: Tensor
    """[T] log-prob of the target at the given temperature."""
    entropy_T: Tensor
    """[T] entropy of the distribution at the given temperature, in nats."""


class _Columns(NamedTuple):
    """Which part of the vocabulary this rank holds, and how logits are scaled."""

    start: int
    """Vocabulary id of local column 0."""
    vocab_size: int
    """True size of the vocabulary; columns from here on are padding."""
    temperature: float


def vocab_parallel_logprobs(
    logits_NV: Tensor,
    target_T: Tensor,
    *,
    vocab_size: int,
    rows_T: Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> TokenLogprobs:
    """Compute log-prob and entropy of the targets, differentiable in the logits.

    A collective: every rank of ``group`` calls it with the same targets, rows and temperature, with
    zero tokens too. It computes in float32 (in float64 for float64 logits). The gradient of the
    entropy is only computed where something depends on the entropy. NaN and +inf logits and targets
    outside the vocabulary make the token's results NaN (no wait for the device); a −inf logit adds
    nothing. Double backward is not supported.

    Args:
        logits_NV: [N, V] this rank's columns; float32, bfloat16, float16 or float64.
        target_T: [T] int64 global vocabulary ids.
        vocab_size: True vocabulary size, without padding columns.
        rows_T: [T] int64, the row of the logits that predicts each target; None: row t for
            target t.
        temperature: Logits are divided by it, > 0.
        group: The tensor-parallel group; None: the logits are whole.

    Returns:
        Log-probs and entropies, equal on all ranks of the group.

    Raises:
        ValueError: For shapes, types or settings that do not fit together.
    """
    _check_arguments(logits_NV, target_T, rows_T, vocab_size, temperature, group)
    rank = 0 if group is None else dist.get_rank(group)
    columns = _Columns(rank * logits_NV.shape[1], vocab_size, temperature)
    logprob_T, entropy_T = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_NV, target_T, rows_T, columns, group
    )
    return TokenLogprobs(logprob_T, entropy_T)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the logits as they are and three floats per token; recomputes the softmax backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits_NV: Tensor,
        target_T: Tensor,
        rows_T: Tensor | None,
        columns: _Columns,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        partials_T4 = logprob_partials(logits_NV, target_T, rows_T, columns)
        partials_PT4 = _all_gather(partials_T4, group)
        logprob_T, entropy_T, max_T, log_sum_T = logprob_combine(partials_PT4)
        saved = (logits_NV, target_T, rows_T, max_T, log_sum_T, entropy_T)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # rows_T may be None
        ctx.columns = columns  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits_NV, target_T, rows_T, max_T, log_sum_T, entropy_T = ctx.saved_tensors  # type: ignore[attr-defined]
        columns: _Columns = ctx.columns  # type: ignore[attr-defined]
        if grad_logprob_T is None and grad_entropy_T is None:
            return None, None, None, None, None
        grad_NV = torch.zeros_like(logits_NV, memory_format=torch.contiguous_format)
        for chunk, scaled_CV in _scaled_chunks(logits_NV, rows_T, target_T.numel(), columns):
            log_prob_CV = scaled_CV.sub_(max_T[chunk, None]).sub_(log_sum_T[chunk, None])
            grad_CV = _chunk_gradient(
                log_prob_CV,
                entropy_T[chunk],
                None if grad_logprob_T is None else grad_logprob_T[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
            )
            if grad_logprob_T is not None:
                owned_C, local_C = _locate(target_T[chunk], columns, grad_CV.shape[1])
                grad_at_target_C = torch.where(owned_C, grad_logprob_T[chunk], 0).to(grad_CV.dtype)
                grad_CV.scatter_add_(1, local_C[:, None], grad_at_target_C[:, None])
            grad_CV.div_(columns.temperature)
            if rows_T is None:
                grad_NV[chunk] = grad_CV.to(grad_NV.dtype)
            else:
                grad_NV.index_add_(0, rows_T[chunk], grad_CV.to(grad_NV.dtype))
        return grad_NV, None, None, None, None


def _chunk_gradient(
    log_prob_CV: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Return ∂/∂x without the target's own term: −p·g_logprob − p·(log p + H)·g_entropy."""
    prob_CV = log_prob_CV.exp()
    factor_CV = torch.zeros_like(prob_CV)
    if grad_logprob_C is not None:
        factor_CV -= grad_logprob_C[:, None]
    if grad_entropy_C is not None:
        # A column with p = 0 has log p = −inf; its term tends to 0.
        shifted_CV = (log_prob_CV + entropy_C[:, None]).masked_fill_(prob_CV == 0, 0.0)
        factor_CV -= shifted_CV.mul_(grad_entropy_C[:, None])
    return prob_CV.mul_(factor_CV)


def logprob_partials(
    logits_NV: Tensor, target_T: Tensor, rows_T: Tensor | None, columns: _Columns
) -> Tensor:
    """Reduce this rank's columns to [T, 4]: m, s, t and x_y (0 where another rank owns it)."""
    num_tokens = target_T.numel()
    dtype = _compute_dtype(logits_NV)
    partials_T4 = torch.zeros(num_tokens, 4, dtype=dtype, device=logits_NV.device)
    for chunk, scaled_CV in _scaled_chunks(logits_NV, rows_T, num_tokens, columns):
        partials_C4 = partials_T4[chunk]
        owned_C, local_C = _locate(target_T[chunk], columns, scaled_CV.shape[1])
        x_target_C = scaled_CV.gather(1, local_C[:, None]).squeeze(1)
        partials_C4[:, TARGET] = torch.where(owned_C, x_target_C, 0)
        max_C = scaled_CV.amax(dim=1)
        partials_C4[:, MAX] = max_C
        # A row of −inf alone (all padding) keeps m = −inf and s = 0: shift it by 0 instead.
        shift_C1 = torch.where(max_C == -math.inf, 0, max_C)[:, None]
        shifted_CV = scaled_CV.sub_(shift_C1)
        exp_CV = shifted_CV.exp()
        partials_C4[:, SUM] = exp_CV.sum(dim=1)
        partials_C4[:, WEIGHTED] = exp_CV.mul_(shifted_CV.masked_fill_(exp_CV == 0, 0.0)).sum(dim=1)
    outside_T = (target_T < 0) | (target_T >= columns.vocab_size)
    partials_T4[:, TARGET].masked_fill_(outside_T, math.nan)
    return partials_T4


def logprob_combine(partials_PT4: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge the ranks' partials [P, T, 4] in rank order.

    Returns:
        Log-prob, entropy, M and log S, each [T].
    """
    max_PT, sum_PT, weighted_PT, target_PT = partials_PT4.unbind(dim=2)
    max_T = max_PT.amax(dim=0)
    shift_PT = torch.where(max_PT == -math.inf, 0, max_PT - max_T)
    total_T, weighted_T, target_T = (torch.zeros_like(max_T) for _ in range(3))
    for rank in range(partials_PT4.shape[0]):
        alpha_T = shift_PT[rank].exp()
        total_T += alpha_T * sum_PT[rank]
        weighted_T += alpha_T * (weighted_PT[rank] + shift_PT[rank] * sum_PT[rank])
        target_T += target_PT[rank]
    log_sum_T = total_T.log()
    logprob_T = (target_T - max_T) - log_sum_T
    entropy_T = log_sum_T - weighted_T / total_T
    return logprob_T, entropy_T, max_T, log_sum_T


def _scaled_chunks(
    logits_NV: Tensor, rows_T: Tensor | None, num_tokens: int, columns: _Columns
) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens with their own copy of logits / temperature, padding set to −inf."""
    num_columns = logits_NV.shape[1]
    true_columns = min(max(columns.vocab_size - columns.start, 0), num_columns)
    chunk_tokens = max(1, CHUNK_ELEMENTS // num_columns)
    for begin in range(0, num_tokens, chunk_tokens):
        chunk = slice(begin, min(begin + chunk_tokens, num_tokens))
        logits_CV = logits_NV[chunk] if rows_T is None else logits_NV.index_select(0, rows_T[chunk])
        scaled_CV = logits_CV.to(_compute_dtype(logits_NV)) / columns.temperature
        scaled_CV[:, true_columns:] = -math.inf
        yield chunk, scaled_CV


def _locate(target_C: Tensor, columns: _Columns, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in this rank's columns, and the local column of each (clamped)."""
    local_C = target_C - columns.start
    owned_C = (local_C >= 0) & (local_C < num_columns)
    return owned_C, local_C.clamp(0, num_columns - 1)


def _all_gather(partials_T4: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return partials_T4[None]
    num_ranks = dist.get_world_size(group)
    gathered = [torch.empty_like(partials_T4) for _ in range(num_ranks)]
    dist.all_gather(gathered, partials_T4, group=group)
    return torch.stack(gathered)


def _compute_dtype(logits_NV: Tensor) -> torch.dtype:
    return torch.float64 if logits_NV.dtype == torch.float64 else torch.float32


def _check_arguments(
    logits_NV: Tensor,
    target_T: Tensor,
    rows_T: Tensor | None,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> None:
    if logits_NV.dim() != 2 or logits_NV.shape[1] == 0 or not logits_NV.is_floating_point():
        raise ValueError(
            "logits must be floating point of shape [N, V > 0], got "
            f"{logits_NV.dtype} {list(logits_NV.shape)}"
        )
    for name, index_T in (("target", target_T), ("rows", rows_T)):
        if index_T is not None and (index_T.dim() != 1 or index_T.dtype != torch.int64):
            raise ValueError(
                f"{name} must be int64 of shape [T], got {index_T.dtype} {list(index_T.shape)}"
            )
    num_rows = logits_NV.shape[0] if rows_T is None else rows_T.numel()
    if num_rows != target_T.numel():
        raise ValueError(
            f"needs one row of logits for each target, got {num_rows} rows and "
            f"{target_T.numel()} targets"
        )
    num_ranks = 1 if group is None else dist.get_world_size(group)
    if not 0 < vocab_size <= logits_NV.shape[1] * num_ranks:
        raise ValueError(
            f"vocab_size must lie in 1 … {logits_NV.shape[1] * num_ranks} (columns × ranks), "
            f"got {vocab_size}; pass the vocabulary size without padding"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}")
