"""Log-probs and a loss over tokens from hidden states, without the logits of all tokens at once.

Response tokens are processed in chunks. Per chunk of the loss, with W the language-model head:

    logits = hidden · Wᵀ → partials → all-gather → log-prob → loss and coefficient
    → ∂loss/∂logits, in place → ∂loss/∂hidden = ∂logits · W,  ∂loss/∂W += ∂logitsᵀ · hidden

That is three GEMMs, and nothing of a logit outlives its chunk. All that a token's loss depends on
is known before the forward pass, which therefore computes the gradients too; the backward pass only
returns them. Both gradients are accumulated in float32.

With a ``Teacher`` the loss may also depend on the KL divergence between both distributions over the
whole vocabulary. The teacher's logits of a chunk take a second buffer [C, V], the all-gather
exchanges [C, 8], and gradients reach the student only.

Context-parallel ranks each call it with the tokens they hold: loss weights are over the global
denominators and rows already point at the predicting position, so their sums and gradients add up.

Shape legend: N = rows of the hidden states over all ranks, M = rows of this rank (N, or N over the
ranks under sequence parallelism), H = hidden size (the teacher's may differ), V = local
vocabulary columns, T = response tokens, C = tokens of a chunk, P = ranks of the tensor-parallel
group.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.ops.logprob import (
    Columns,
    TokenLogprobs,
    TokenLoss,
    columns_of_rank,
    gather_partials,
)

Direction = Literal["reverse", "forward"]
"""KL(student ‖ teacher) or KL(teacher ‖ student)."""

PRODUCT_ROWS = 2048
"""Rows of the weight gradient per GEMM, where GEMMs cannot accumulate in place."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """The language-model head on one rank of a tensor-parallel group."""

    weight: Tensor
    """[V, H] this rank's rows of the (padded) vocabulary. If Megatron's data parallelism gave
    it a ``main_grad``, gradients accumulate there."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks that share the vocabulary; None: this rank holds all of it."""
    sequence_parallel: bool = False
    """Whether each rank of the group holds its own part of the hidden states' rows."""

    @property
    def num_ranks(self) -> int:
        """P."""
        return 1 if self.tensor_group is None else dist.get_world_size(self.tensor_group)

    def gather_rows(self, hidden_MH: Tensor) -> Tensor:
        """Return the hidden states [N, H] of all ranks."""
        if not self.sequence_parallel or self.num_ranks == 1:
            return hidden_MH
        num_rows, hidden_size = hidden_MH.shape
        hidden_NH = hidden_MH.new_empty(num_rows * self.num_ranks, hidden_size)
        dist.all_gather_into_tensor(hidden_NH, hidden_MH.contiguous(), group=self.tensor_group)
        return hidden_NH

    def sum_over_ranks(self, grad_NH: Tensor) -> Tensor:
        """Sum the contributions of the ranks' columns; return this rank's rows [M, H]."""
        if self.num_ranks == 1:
            return grad_NH
        if not self.sequence_parallel:
            dist.all_reduce(grad_NH, group=self.tensor_group)
            return grad_NH
        grad_MH = grad_NH.new_empty(grad_NH.shape[0] // self.num_ranks, grad_NH.shape[1])
        dist.reduce_scatter_tensor(grad_MH, grad_NH, group=self.tensor_group)
        return grad_MH


class Teacher(Protocol):
    """A teacher's distribution at each response token, and the direction of the divergence.

    With p of the student and q of the teacher, both at the student's temperature:

        reverse: KL(p ‖ q) = Σ_j p_j (log p_j − log q_j),   forward: KL(q ‖ p).

    Where the second distribution's logit is −inf, its log-prob is floored (csrc/README.md).
    """

    @property
    def direction(self) -> Direction:
        """``reverse``: KL(student ‖ teacher); ``forward``: KL(teacher ‖ student)."""

    def logits(self, chunk: slice, buffer_CV: Tensor, columns: Columns) -> Tensor:
        """Write this rank's columns of a chunk's logits into the buffer; return them, [C, V]."""


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """A ``Teacher`` given by its hidden states."""

    hidden_TH: Tensor
    """[T, H] input of the teacher's head for each response token, in token order: gathered over
    sequence parallelism, without gradient, in the dtype of its head."""
    head: OutputHead
    """The teacher's head, with as many rows per rank as the student's."""
    direction: Direction
    """See ``Teacher``."""

    def logits(self, chunk: slice, buffer_CV: Tensor, columns: Columns) -> Tensor:
        """See ``Teacher``."""
        weight_HV = self.head.weight.detach().t()
        assert weight_HV.shape[1] == buffer_CV.shape[1], "both heads divide one vocabulary"
        if weight_HV.dtype != buffer_CV.dtype:
            expected, got = (str(t.dtype).removeprefix("torch.") for t in (buffer_CV, weight_HV))
            raise RuntimeError(f"teacher must be {expected}, got {got}; build both in one dtype")
        hidden_CH = self.hidden_TH[chunk].detach()
        return torch.mm(hidden_CH, weight_HV, out=buffer_CV[: len(hidden_CH)])


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """A ``Teacher`` given by its likeliest tokens, whose probabilities are renormalised.

    Its other probabilities are 0, so only KL(teacher ‖ student) is of use.
    """

    ids_TK: Tensor
    """[T, K] int64: the K likeliest tokens at each position, without repeats; below 0: no token."""
    logprob_TK: Tensor
    """[T, K] float32: their log-probs at the student's temperature; ignored without a token."""

    direction: Direction = "forward"
    """See ``Teacher``."""

    def logits(self, chunk: slice, buffer_CV: Tensor, columns: Columns) -> Tensor:
        """See ``Teacher``."""
        ids_CK = self.ids_TK[chunk]
        logprob_CK = torch.where(ids_CK >= 0, self.logprob_TK[chunk], -torch.inf)
        logits_CV = buffer_CV[: len(ids_CK)].fill_(-torch.inf)
        local_CK, is_here_CK = _local_columns(ids_CK, columns, logits_CV.shape[1])
        # Relative to the likeliest: 16-bit logits are then most precise where probability is high.
        value_CK = (logprob_CK - logprob_CK.amax(dim=1, keepdim=True)) * columns.temperature
        value_CK = torch.where(is_here_CK, value_CK, -torch.inf).to(logits_CV.dtype)
        return logits_CV.scatter_reduce_(1, local_CK, value_CK, "amax")


def _local_columns(ids_CK: Tensor, columns: Columns, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return this rank's column of each token, any one for others; and which are here."""
    local_CK = ids_CK - columns.start
    is_here_CK = (ids_CK >= 0) & (local_CK >= 0) & (local_CK < num_columns)
    return local_CK.clamp(0, num_columns - 1), is_here_CK


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Response tokens whose logits are computed and reduced chunk by chunk."""

    head: OutputHead
    target_T: Tensor
    """[T] int64 global vocabulary ids."""
    rows_T: Tensor
    """[T] int64, the row of [N, H] that predicts each target."""
    vocab_size: int
    """True vocabulary size, without padding rows."""
    temperature: float
    """Logits are divided by it, > 0."""
    chunk_tokens: int
    """Maximum number of tokens whose logits are held at a time."""
    teacher: Teacher | None = None
    head_TK: Tensor | None = None
    """[T, K] int64: other tokens at each position whose log-probs the loss depends on, without
    repeats; below 0: no token."""

    @property
    def columns(self) -> Columns:
        """The rows of the head that this rank has."""
        head = self.head
        return columns_of_rank(
            len(head.weight), self.vocab_size, self.temperature, head.tensor_group
        )

    def slices(self) -> list[slice]:
        """Return the tokens of each chunk."""
        num_tokens = len(self.target_T)
        begins = range(0, num_tokens, self.chunk_tokens)
        return [slice(begin, min(begin + self.chunk_tokens, num_tokens)) for begin in begins]

    def new_buffer(self) -> Tensor:
        """Allocate a buffer for the logits of every chunk; a teacher needs one of its own."""
        weight_VH = self.head.weight
        return weight_VH.new_empty(min(self.chunk_tokens, len(self.target_T)), len(weight_VH))

    def logits(self, hidden_CH: Tensor, buffer_CV: Tensor) -> Tensor:
        """Return the logits of a chunk, in the model's dtype, in the buffer."""
        weight_HV = self.head.weight.detach().t()
        return torch.mm(hidden_CH, weight_HV, out=buffer_CV[: len(hidden_CH)])

    def partials(self, logits_CV: Tensor, chunk: slice) -> Tensor:
        """Reduce this rank's columns to [C, 4]."""
        partials_C4: Tensor = torch.ops.bapo.logprob_partials(
            logits_CV, None, self.target_T[chunk], *self.columns
        )
        return partials_C4

    def combine(self, partials_C4: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Exchange partials between the ranks; returns log-prob, entropy, M and log S [C]."""
        partials_PC4 = gather_partials(partials_C4, self.head.tensor_group)
        results_C: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.bapo.logprob_combine(
            partials_PC4, self.temperature
        )
        return results_C

    def differentiate_(
        self,
        logits_CV: Tensor,
        chunk: slice,
        token_loss: TokenLoss,
        teacher_buffer_CV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Overwrite a chunk's logits with ∂loss/∂logits; returns its loss, ℓ and H [C].

        A teacher's logits go into ``teacher_buffer_CV``.
        """
        target_C, columns = self.target_T[chunk], self.columns
        if self.teacher is None:
            logprob_C, entropy_C, max_C, log_sum_C = self.combine(self.partials(logits_CV, chunk))
            kl_C = None
        else:
            assert teacher_buffer_CV is not None
            direction = self.teacher.direction
            teacher_CV = self.teacher.logits(chunk, teacher_buffer_CV, columns)
            assert len(teacher_CV) == len(logits_CV), "one row of the teacher per target"
            partials_C8 = torch.ops.bapo.kl_partials(
                logits_CV, teacher_CV, target_C, *columns, direction
            )
            partials_PC8 = gather_partials(partials_C8, self.head.tensor_group)
            logprob_C, entropy_C, max_C, log_sum_C, *teacher, kl_C = torch.ops.bapo.kl_combine(
                partials_PC8, columns.temperature, direction
            )
        head_CK = None
        if self.head_TK is not None:
            head_CK = self._head_logprobs(logits_CV, self.head_TK[chunk], max_C, log_sum_C)
        gradient = token_loss(logprob_C, entropy_C, chunk, kl_C, head_CK)
        softmax = (target_C, max_C, log_sum_C, entropy_C)
        by_logprob_C = gradient.logprob_T
        if gradient.head_TK is not None:
            # Every log-prob has the derivative −p_j by the other logits.
            by_logprob_C = by_logprob_C + gradient.head_TK.sum(dim=1)
        if gradient.kl_T is None:
            torch.ops.bapo.logits_backward_(
                logits_CV, None, *softmax, by_logprob_C, gradient.entropy_T, *columns
            )
        else:
            torch.ops.bapo.kl_backward_(
                logits_CV,
                teacher_CV,
                *softmax,
                *teacher,
                kl_C,
                by_logprob_C,
                gradient.entropy_T,
                gradient.kl_T,
                *columns,
                direction,
            )
        if gradient.head_TK is not None:
            assert self.head_TK is not None
            self._move_to_head(logits_CV, self.head_TK[chunk], target_C, gradient.head_TK)
        return gradient.loss, logprob_C, entropy_C

    def _head_logprobs(
        self, logits_CV: Tensor, ids_CK: Tensor, max_C: Tensor, log_sum_C: Tensor
    ) -> Tensor:
        """Return the log-probs of the head's tokens, [C, K] float32, equal on all ranks."""
        local_CK, is_here_CK = _local_columns(ids_CK, self.columns, logits_CV.shape[1])
        shifted_CK = logits_CV.gather(1, local_CK).float() - max_C[:, None]
        logprob_CK = shifted_CK / self.temperature - log_sum_C[:, None]
        logprob_CK = torch.where(is_here_CK, logprob_CK, -torch.inf)
        if self.head.num_ranks > 1:
            dist.all_reduce(logprob_CK, dist.ReduceOp.MAX, group=self.head.tensor_group)
        return logprob_CK

    def _move_to_head(
        self, grad_CV: Tensor, ids_CK: Tensor, target_C: Tensor, by_head_CK: Tensor
    ) -> None:
        """Add the head's derivatives to its logits' gradients, less what the target got of them."""
        ids_CL = torch.cat((ids_CK, target_C[:, None]), dim=1)
        local_CL, is_here_CL = _local_columns(ids_CL, self.columns, grad_CV.shape[1])
        total_C1 = by_head_CK.sum(dim=1, keepdim=True)
        # In one place: rounding must not depend on the order of additions.
        is_target_CK = ids_CK == target_C[:, None]
        value_CK = by_head_CK - total_C1 * is_target_CK
        rest_C1 = -total_C1 * ~is_target_CK.any(dim=1, keepdim=True)
        value_CL = torch.cat((value_CK, rest_C1), dim=1) / self.temperature
        grad_CV.scatter_add_(1, local_CL, torch.where(is_here_CL, value_CL, 0.0).to(grad_CV.dtype))


def chunked_logprobs(hidden_MH: Tensor, chunks: Chunks) -> TokenLogprobs:
    """Compute log-prob and entropy of the targets, without gradient.

    A collective: every rank of the head's group calls it with the same tokens, even if none. One
    all-gather of [T, 4], and under sequence parallelism one of the hidden states.

    ``hidden_MH`` is the input of the head, [M, H] of its dtype: float32, bfloat16 or float16.

    Returns:
        Log-probs and entropies, equal on all ranks of the group.
    """
    with torch.no_grad():
        hidden_NH = chunks.head.gather_rows(hidden_MH)
        partials_T4 = torch.empty(len(chunks.target_T), 4, device=hidden_MH.device)
        buffer_CV = chunks.new_buffer()
        for chunk in chunks.slices():
            logits_CV = chunks.logits(hidden_NH.index_select(0, chunks.rows_T[chunk]), buffer_CV)
            partials_T4[chunk] = chunks.partials(logits_CV, chunk)
        logprob_T, entropy_T, _, _ = chunks.combine(partials_T4)
    return TokenLogprobs(logprob_T, entropy_T)


def chunked_loss(
    hidden_MH: Tensor, chunks: Chunks, token_loss: TokenLoss
) -> tuple[Tensor, TokenLogprobs]:
    """Compute a loss over tokens together with its gradients.

    A collective: every rank of the head's group calls it with the same tokens, even if none. One
    all-gather of [C, 4] per chunk, and one reduction of the hidden states' gradient.

    The backward pass must run once, with the gradient 1 (checked on the device without waiting).
    The weight's gradient is added to its ``main_grad`` here, in the forward pass: a caller that
    skips the backward pass must clear it.

    ``token_loss`` is the loss of a chunk's tokens; with a teacher it also gets their divergence
    from it, [C], and with ``Chunks.head_TK`` those log-probs, [C, K]. ``hidden_MH`` is as in
    ``chunked_logprobs``.

    Returns:
        The loss (scalar float32); ℓ and H of all tokens, without gradient.

    Raises:
        RuntimeError: The teacher's logits and the student's differ in dtype.
    """
    # Gradients would be added to the weights even under no_grad.
    assert torch.is_grad_enabled(), "call chunked_logprobs"
    loss, logprob_T, entropy_T = _ChunkedLoss.apply(
        hidden_MH, chunks.head.weight, chunks, token_loss
    )
    return loss, TokenLogprobs(logprob_T, entropy_T)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass and saves nothing but them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, weight_VH: Tensor, chunks: Chunks, token_loss: TokenLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        assert needs_hidden or needs_weight, "call chunked_logprobs"
        hidden_NH = chunks.head.gather_rows(hidden_MH)
        grad_hidden_NH = _float32_zeros(hidden_NH) if needs_hidden else None
        main_grad_VH = getattr(weight_VH, "main_grad", None)
        if main_grad_VH is not None:
            assert main_grad_VH.dtype == torch.float32, "set grad_reduce_in_fp32"
        grad_weight_VH = None
        if needs_weight:
            grad_weight_VH = _float32_zeros(weight_VH) if main_grad_VH is None else main_grad_VH
        loss = torch.zeros((), dtype=torch.float64, device=hidden_NH.device)
        logprob_T = torch.empty(len(chunks.target_T), device=hidden_NH.device)
        entropy_T = torch.empty_like(logprob_T)
        grad_CV = buffer_CV = chunks.new_buffer()
        teacher_buffer_CV = None
        if chunks.teacher is not None:
            teacher_buffer_CV = chunks.new_buffer()
        for chunk in chunks.slices():
            rows_C = chunks.rows_T[chunk]
            hidden_CH = hidden_NH.index_select(0, rows_C)
            grad_CV = chunks.logits(hidden_CH, buffer_CV)
            chunk_loss, logprob_T[chunk], entropy_T[chunk] = chunks.differentiate_(
                grad_CV, chunk, token_loss, teacher_buffer_CV
            )
            loss += chunk_loss
            if grad_weight_VH is not None:
                add_product_(grad_weight_VH, grad_CV.t(), hidden_CH)
            del hidden_CH  # frees memory for the other GEMM
            if grad_hidden_NH is not None:
                grad_hidden_NH.index_add_(0, rows_C, _product(grad_CV, weight_VH.detach()))
        del grad_CV, buffer_CV, teacher_buffer_CV  # frees memory for what follows
        grad_hidden_MH = None
        if grad_hidden_NH is not None:
            grad_hidden_MH = chunks.head.sum_over_ranks(grad_hidden_NH).to(hidden_MH.dtype)
        ctx.gradients = (grad_hidden_MH, grad_weight_VH)
        # Not by save_for_backward, which is for values: only attributes are needed.
        ctx.weight = weight_VH
        ctx.in_main_grad = main_grad_VH is not None
        ctx.mark_non_differentiable(logprob_T, entropy_T)
        ctx.set_materialize_grads(False)
        return loss.to(torch.float32), logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_loss: Tensor, *_: None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        assert ctx.gradients is not None, "gradients are handed out once; compute the loss again"
        torch._assert_async(
            grad_loss == 1,
            "the loss of chunked_loss arrives at its backward pass with a gradient other than 1; "
            "multiply the losses of tokens instead",
        )
        grad_hidden_MH, grad_weight_VH = ctx.gradients
        ctx.gradients = None
        if grad_weight_VH is not None and ctx.in_main_grad:
            grad_weight_VH = placeholder_gradient(ctx.weight)
        return grad_hidden_MH, grad_weight_VH, None, None


def _product(left_AC: Tensor, right_CB: Tensor) -> Tensor:
    """Left · right in float32; on CUDA not rounded to 16 bits in between."""
    if left_AC.is_cuda:
        return torch.mm(left_AC, right_CB, out_dtype=torch.float32)
    return torch.mm(left_AC, right_CB).to(torch.float32)


def add_product_(total_AB: Tensor, left_AC: Tensor, right_CB: Tensor) -> None:
    """Add left · right to a total, usually in float32, without a second matrix of its size.

    On CUDA the product is not rounded to the type of its factors in between.
    """
    if left_AC.dtype == total_AB.dtype:
        total_AB.addmm_(left_AC, right_CB)
    elif total_AB.is_cuda:
        torch.addmm(total_AB, left_AC, right_CB, out_dtype=total_AB.dtype, out=total_AB)
    else:
        # PyTorch has no such GEMM on the CPU. Blocks, each rounded once, keep the products and
        # the float32 copies that add_ makes of them small.
        for begin in range(0, len(total_AB), PRODUCT_ROWS):
            block = slice(begin, begin + PRODUCT_ROWS)
            total_AB[block].add_(torch.mm(left_AC[block], right_CB))


def placeholder_gradient(weight_VH: Tensor) -> Tensor:
    """Return a dummy gradient for one already in ``main_grad``, as Megatron's layers do.

    Megatron's hook drops it, but would not run without it. With
    ``zero_out_wgrad`` (tied embeddings) the hook adds it, together with the embedding's gradient.
    """
    weight_VH.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight_VH, "zero_out_wgrad", False):
        return torch.zeros_like(weight_VH)
    return torch.empty_like(weight_VH)


def _float32_zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)
