"""The kernels in readable PyTorch: the specification to read, and the oracle to check against.

Log-probs, gradients and ratios take float64 too, and then compute in float64. The contribution
table and the search are exact integers, for which one implementation is enough: the compiled one,
on the CPU.

A row's columns of this rank are reduced to m = max x, s = Σ e^d and t = Σ e^d · d with
d = (x − m) / temperature, and x_y; m and x_y are raw logits. Over the ranks, with
d_i = (m_i − M) / temperature, a_i = e^d_i, S = Σ a_i s_i and U = Σ a_i (t_i + d_i s_i):

    log-prob = (x_y − M) / temperature − log S,     entropy = log S − U / S.

A KL divergence is a mean over its first distribution, the student's (``reverse``: KL(student ‖
teacher)) or the teacher's (``forward``: KL(teacher ‖ student)). With d of the first row and d' of
the second, whose columns of −inf have d' = ``LOG_FLOOR``, c = Σ e^d (d − d') and f = Σ e^d over
those columns; over the ranks, with b_i = (m'_i − M') / temperature,

    KL = Σ a_i (c_i + (d_i − b_i) s_i + b_i f_i) / S − log S + log S'.

Shape legend: N = rows of the logits, V = local columns, T = tokens, C = tokens of a chunk, P =
ranks of the tensor-parallel group.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bapo_megatron.ops import extension  # noqa: F401  (registers the operations)

Direction = Literal["reverse", "forward"]
"""KL(student ‖ teacher) or KL(teacher ‖ student)."""

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in float32 at a time: 64 MB."""

LOG_FLOOR = -150 * math.log(2)
"""d' of a column of −inf in the second row of a KL divergence: −104, as kMinExponent of
csrc/common/logprob.h."""

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
            scaled_CV = _scaled_(raw_CV, max_C, temperature)
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
            grad_logprob_C, grad_entropy_C = grad_logprob_T[chunk], grad_entropy_T[chunk]
            grad_CV = _gradient(
                log_prob_CV,
                entropy[chunk],
                target[chunk],
                grad_logprob_C,
                grad_entropy_C,
                vocab_start,
            )
            grad_CV.div_(temperature)
            # A token without a gradient gets zeros, whatever its logits hold.
            idle_C = (grad_logprob_C == 0) & (grad_entropy_C == 0)
            grad_CV.masked_fill_(idle_C[:, None], 0.0)
            _padding(grad_CV, vocab_size - vocab_start).fill_(0.0)
            logits.index_copy_(0, rows_T[chunk], grad_CV.to(logits.dtype))
        unselected_N = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        unselected_N[rows_T] = False
        logits.masked_fill_(unselected_N[:, None], 0.0)

    def kl_partials(
        self,
        student: Tensor,
        teacher: Tensor,
        target: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        direction: Direction,
    ) -> Tensor:
        """Reduce this rank's columns of both rows of each token, [T, V] each, to [T, 8].

        These are the student's m, s, t and x_y, the teacher's m and s, and c and f.
        """
        columns = (vocab_start, vocab_size, temperature)
        partials_T8 = torch.cat(
            [
                self.logprob_partials(student, None, target, *columns),
                self.logprob_partials(teacher, None, target, *columns),
            ],
            dim=1,
        )
        num_true = vocab_size - vocab_start
        for (chunk, student_CV), (_, teacher_CV) in zip(
            _chunks(student, None, len(target), num_true),
            _chunks(teacher, None, len(target), num_true),
            strict=True,
        ):
            student_max_C, *_, teacher_max_C, _, cross_C, floored_C = partials_T8[chunk].unbind(1)
            student_CV = _scaled_(student_CV, student_max_C, temperature)
            teacher_CV = _scaled_(teacher_CV, teacher_max_C, temperature)
            first_CV, second_CV = _in_order(student_CV, teacher_CV, direction)
            exp_CV = first_CV.exp()
            has_floor_CV = second_CV == -math.inf
            difference_CV = first_CV - second_CV.masked_fill(has_floor_CV, LOG_FLOOR)
            cross_C.copy_((exp_CV * difference_CV.masked_fill_(exp_CV == 0, 0.0)).sum(dim=1))
            floored_C.copy_((exp_CV * has_floor_CV).sum(dim=1))
        return partials_T8

    def kl_combine(
        self, partials: Tensor, temperature: float, direction: Direction
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Merge partials [P, T, 8] to log-prob, entropy, M, log S, the teacher's M and log S, KL.

        Each is [T]. A NaN in a token's partials makes all seven of its results NaN.
        """
        exact_PT8 = partials.double()
        student_PT4, teacher_PT4 = exact_PT8[..., :4], exact_PT8[..., 4:]
        student = self.logprob_combine(student_PT4, temperature)
        # Both halves begin with m and s; of the teacher's results only M and log S are used.
        teacher = self.logprob_combine(teacher_PT4, temperature)
        _, _, cross_PT, floored_PT = teacher_PT4.unbind(dim=2)
        first_PT4, second_PT4 = _in_order(student_PT4, teacher_PT4, direction)
        (_, _, max_T, log_sum_T), (_, _, second_max_T, second_log_sum_T) = _in_order(
            student, teacher, direction
        )
        max_PT, sum_PT = first_PT4[..., 0], first_PT4[..., 1]
        second_max_PT = second_PT4[..., 0]
        step_PT = (max_PT - max_T) / temperature
        second_step_PT = (second_max_PT - second_max_T) / temperature
        second_step_PT = second_step_PT.masked_fill(second_max_PT == -math.inf, 0)
        moved_PT = cross_PT + (step_PT - second_step_PT) * sum_PT + second_step_PT * floored_PT
        moved_PT = (step_PT.exp() * moved_PT).masked_fill(max_PT == -math.inf, 0)
        kl_T = moved_PT.sum(dim=0) / log_sum_T.exp() - log_sum_T + second_log_sum_T
        results = (*student, *teacher[2:], kl_T)
        poisoned_T = torch.stack(results).isnan().any(dim=0)
        logprob_T, entropy_T, max_T, log_sum_T, teacher_max_T, teacher_log_sum_T, kl_T = (
            values_T.masked_fill(poisoned_T, math.nan).to(partials.dtype) for values_T in results
        )
        return logprob_T, entropy_T, max_T, log_sum_T, teacher_max_T, teacher_log_sum_T, kl_T

    def kl_backward_(
        self,
        student: Tensor,
        teacher: Tensor,
        target: Tensor,
        max: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
        teacher_max: Tensor,
        teacher_log_sum: Tensor,
        kl: Tensor,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        grad_kl: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        direction: Direction,
    ) -> None:
        """Overwrite the student's logits [T, V] with their gradient."""
        zeros_T = torch.zeros_like(log_sum)
        grad_logprob_T = zeros_T if grad_logprob is None else grad_logprob
        grad_entropy_T = zeros_T if grad_entropy is None else grad_entropy
        _outside(student, None, target, vocab_size)
        num_true = vocab_size - vocab_start
        for (chunk, student_CV), (_, teacher_CV) in zip(
            _chunks(student, None, len(target), num_true),
            _chunks(teacher, None, len(target), num_true),
            strict=True,
        ):
            is_minus_infinity_CV = student_CV == -math.inf
            log_p_CV = student_CV.sub_(max[chunk, None]).div_(temperature)
            log_p_CV.sub_(log_sum[chunk, None])
            d_CV = teacher_CV.sub_(teacher_max[chunk, None]).div_(temperature)
            if direction == "reverse":
                log_q_CV = d_CV.masked_fill_(d_CV == -math.inf, LOG_FLOOR)
                log_q_CV.sub_(teacher_log_sum[chunk, None])
                p_CV = log_p_CV.exp()
                by_kl_CV = p_CV * (log_p_CV - log_q_CV - kl[chunk, None]).masked_fill_(p_CV == 0, 0)
            else:
                q_CV = d_CV.sub_(teacher_log_sum[chunk, None]).exp_()
                by_kl_CV = (log_p_CV.exp() - q_CV).masked_fill_(is_minus_infinity_CV, 0)
            grad_logprob_C, grad_entropy_C = grad_logprob_T[chunk], grad_entropy_T[chunk]
            grad_CV = _gradient(
                log_p_CV, entropy[chunk], target[chunk], grad_logprob_C, grad_entropy_C, vocab_start
            )
            grad_CV.add_(grad_kl[chunk, None] * by_kl_CV).div_(temperature)
            idle_C = (grad_logprob_C == 0) & (grad_entropy_C == 0) & (grad_kl[chunk] == 0)
            grad_CV.masked_fill_(idle_C[:, None], 0.0)
            _padding(grad_CV, num_true).fill_(0.0)
            student[chunk] = grad_CV.to(student.dtype)

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


def _gradient(
    log_prob_CV: Tensor,
    entropy_C: Tensor,
    target_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor,
    vocab_start: int,
) -> Tensor:
    """Compute ∂(g · log-prob + h · entropy)/∂(x / temperature), [C, V]."""
    prob_CV = log_prob_CV.exp()
    # A column with p = 0 has log p = −inf; its term tends to 0.
    from_mean_CV = (log_prob_CV + entropy_C[:, None]).masked_fill_(prob_CV == 0, 0)
    grad_CV = -prob_CV * (grad_logprob_C[:, None] + grad_entropy_C[:, None] * from_mean_CV)
    owned_C, local_C = _locate(target_C, vocab_start, grad_CV.shape[1])
    at_target_C = torch.where(owned_C, grad_logprob_C, 0).to(grad_CV.dtype)
    return grad_CV.scatter_add_(1, local_C[:, None], at_target_C[:, None])


def _scaled_(raw_CV: Tensor, max_C: Tensor, temperature: float) -> Tensor:
    """Overwrite logits with d; a row of −inf alone (all padding), m = −inf, is shifted by 0."""
    shift_C = torch.where(max_C == -math.inf, 0, max_C)
    return raw_CV.sub_(shift_C[:, None]).div_(temperature)


def _in_order[T](student: T, teacher: T, direction: Direction) -> tuple[T, T]:
    """Return the first distribution, over which the KL divergence is a mean, and the second."""
    if direction not in ("reverse", "forward"):
        raise RuntimeError(f"direction must be reverse or forward, got '{direction}'")
    return (student, teacher) if direction == "reverse" else (teacher, student)


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
