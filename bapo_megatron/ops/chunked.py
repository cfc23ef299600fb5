"""Log-probs and a loss over tokens from hidden states, without the logits of all tokens at once.

The response tokens are walked in chunks. Per chunk of the loss, with W the language-model head:

    logits = hidden · Wᵀ → partials → all-gather → log-prob → loss and coefficient
    → ∂loss/∂logits, in place → ∂loss/∂hidden = ∂logits · W,  ∂loss/∂W += ∂logitsᵀ · hidden

That is three matrix products, and nothing per logit outlives its chunk. What the loss of a token
depends on is known before the forward pass, which therefore computes the gradients as well; the
backward pass only hands them out. Both gradients are added up in float32.

Context-parallel ranks each call it with the tokens they hold: loss weights are over the global
denominators and rows already point at the predicting position, so their sums and gradients add up.

Shape legend: N = rows of the hidden states over all ranks, M = rows of this rank (N, or N over the
ranks under sequence parallelism), H = hidden size, V = local vocabulary columns, T = response
tokens, C = tokens of a chunk, P = ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from bapo_megatron.ops.backend import Kernels, select_kernels
from bapo_megatron.ops.chunk_logits import ChunkLogits, OutputHead
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.ops.token_loss import TokenLoss

__all__ = ["OutputHead", "chunked_logprobs", "chunked_loss"]

PRODUCT_ROWS = 2048
"""Rows of the weight's gradient per product, where products cannot be added up in place."""


def chunked_logprobs(
    hidden_MH: Tensor,
    head: OutputHead,
    target_T: Tensor,
    *,
    rows_T: Tensor,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    kernels: Kernels | None = None,
) -> TokenLogprobs:
    """Compute log-prob and entropy of the targets, without gradient.

    A collective: every rank of the head's group calls it with the same tokens, with none too. One
    all-gather of [T, 4], and under sequence parallelism one of the hidden states.

    Args:
        hidden_MH: [M, H] what the head is applied to; float32, bfloat16 or float16.
        head: The head, of the same dtype.
        target_T: [T] int64 global vocabulary ids.
        rows_T: [T] int64, the row of [N, H] that predicts each target.
        vocab_size: True vocabulary size, without padding rows.
        temperature: Logits are divided by it, > 0.
        chunk_tokens: Most tokens whose logits are held at a time.
        kernels: None: the best for the device.

    Returns:
        Log-probs and entropies, equal on all ranks of the group.

    Raises:
        ValueError: For shapes, types or settings that do not fit together.
    """
    if kernels is None:
        kernels = select_kernels("auto", hidden_MH.device)
    logits = ChunkLogits(head, vocab_size, temperature, chunk_tokens, kernels)
    logits.check(hidden_MH, target_T, rows_T)
    with torch.no_grad():
        hidden_NH = head.gather_rows(hidden_MH)
        buffer_CV = logits.new_buffer(target_T)
        partials_T4 = torch.empty(len(target_T), 4, device=hidden_MH.device)
        for chunk in _split(target_T, chunk_tokens):
            hidden_CH = hidden_NH.index_select(0, rows_T[chunk])
            logits_CV = logits.compute(hidden_CH, buffer_CV)
            partials_T4[chunk] = logits.partials(logits_CV, target_T[chunk])
        logprob_T, entropy_T, _, _ = logits.combine(partials_T4)
    return TokenLogprobs(logprob_T, entropy_T)


def chunked_loss(
    hidden_MH: Tensor,
    head: OutputHead,
    target_T: Tensor,
    *,
    rows_T: Tensor,
    vocab_size: int,
    temperature: float,
    token_loss: TokenLoss,
    chunk_tokens: int,
    kernels: Kernels | None = None,
) -> tuple[Tensor, TokenLogprobs]:
    """Compute a loss over tokens and, at once, its gradients.

    A collective: every rank of the head's group calls it with the same tokens, with none too. One
    all-gather of [C, 4] per chunk, and one reduction of the hidden states' gradient.

    The backward pass must arrive with the gradient 1 (checked on the device, nothing waits for it),
    and arrives once. The weight's gradient is added to its ``main_grad`` here, in the forward pass:
    a caller that does not go on to the backward pass must clear it.

    Args:
        hidden_MH: [M, H] what the head is applied to; float32, bfloat16 or float16.
        head: The head, of the same dtype.
        target_T: [T] int64 global vocabulary ids.
        rows_T: [T] int64, the row of [N, H] that predicts each target.
        vocab_size: True vocabulary size, without padding rows.
        temperature: Logits are divided by it, > 0.
        token_loss: The loss of a chunk's tokens.
        chunk_tokens: Most tokens whose logits are held at a time.
        kernels: None: the best for the device.

    Returns:
        The loss (scalar float32); ℓ and H of all tokens, without gradient.

    Raises:
        ValueError: For shapes, types or settings that do not fit together.
        RuntimeError: Where gradients are switched off.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "chunked_loss computes gradients in its forward pass and would add them to the "
            "weights under no_grad too; call chunked_logprobs, or leave the no_grad block"
        )
    if kernels is None:
        kernels = select_kernels("auto", hidden_MH.device)
    logits = ChunkLogits(head, vocab_size, temperature, chunk_tokens, kernels)
    logits.check(hidden_MH, target_T, rows_T)
    if not hidden_MH.requires_grad and not head.weight.requires_grad:
        raise ValueError(
            "neither hidden states nor weight require a gradient; call chunked_logprobs"
        )
    loss, logprob_T, entropy_T = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_MH, head.weight, logits, (target_T, rows_T), token_loss
    )
    return loss, TokenLogprobs(logprob_T, entropy_T)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients forward and keeps them, not what they are computed from."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        logits: ChunkLogits,
        tokens: tuple[Tensor, Tensor],
        token_loss: TokenLoss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        hidden_NH = logits.head.gather_rows(hidden_MH)
        grad_hidden_NH = _float32_zeros(hidden_NH) if needs_hidden else None
        main_grad_VH = getattr(weight_VH, "main_grad", None)
        grad_weight_VH = None
        if needs_weight:
            grad_weight_VH = _float32_zeros(weight_VH) if main_grad_VH is None else main_grad_VH

        target_T, rows_T = tokens
        loss = torch.zeros((), dtype=torch.float64, device=hidden_MH.device)
        logprob_T = torch.empty(len(target_T), device=hidden_MH.device)
        entropy_T = torch.empty_like(logprob_T)
        buffer_CV = logits.new_buffer(target_T)
        for chunk in _split(target_T, logits.chunk_tokens):
            target_C, rows_C = target_T[chunk], rows_T[chunk]
            hidden_CH = hidden_NH.index_select(0, rows_C)
            grad_CV = logits.compute(hidden_CH, buffer_CV)
            combined = logits.combine(logits.partials(grad_CV, target_C))
            logprob_T[chunk], entropy_T[chunk], _, _ = combined
            loss_C, by_logprob_C, by_entropy_C = token_loss(combined[0], combined[1], chunk)
            loss += loss_C
            logits.backward_(grad_CV, target_C, combined, by_logprob_C, by_entropy_C)
            if grad_weight_VH is not None:
                _add_product_(grad_weight_VH, grad_CV.t(), hidden_CH)
            del hidden_CH  # its room is needed for the other product
            if grad_hidden_NH is not None:
                grad_CH = _product(grad_CV, logits.head.weight.detach())
                grad_hidden_NH.index_add_(0, rows_C, grad_CH)
        del buffer_CV  # before the reduction and the cast of the gradient

        grad_hidden_MH = None
        if grad_hidden_NH is not None:
            grad_hidden_MH = logits.head.sum_over_ranks(grad_hidden_NH).to(hidden_MH.dtype)
        ctx.gradients = (grad_hidden_MH, grad_weight_VH)  # type: ignore[attr-defined]
        # Not saved for backward: that is for values, and only its attributes are needed.
        ctx.weight = weight_VH  # type: ignore[attr-defined]
        ctx.in_main_grad = main_grad_VH is not None  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(logprob_T, entropy_T)
        ctx.set_materialize_grads(False)
        return loss.to(torch.float32), logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_loss: Tensor, *_: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.gradients is None:  # type: ignore[attr-defined]
            raise RuntimeError(
                "the backward pass of chunked_loss ran twice, but its gradients are handed "
                "out once; compute the loss again"
            )
        torch._assert_async(
            grad_loss == 1,
            "the loss of chunked_loss arrives at its backward pass with a gradient other than 1; "
            "multiply the losses of tokens instead",
        )
        grad_hidden_MH, grad_weight_VH = ctx.gradients  # type: ignore[attr-defined]
        ctx.gradients = None  # type: ignore[attr-defined]
        if grad_weight_VH is not None and ctx.in_main_grad:  # type: ignore[attr-defined]
            grad_weight_VH = _placeholder(ctx.weight)  # type: ignore[attr-defined]
        return grad_hidden_MH, grad_weight_VH, None, None, None


def _product(left_AC: Tensor, right_CB: Tensor) -> Tensor:
    """Left · right in float32; on CUDA, 16-bit matrices are not rounded in between."""
    if left_AC.is_cuda:
        return torch.mm(left_AC, right_CB, out_dtype=torch.float32)
    return torch.mm(left_AC, right_CB).to(torch.float32)


def _add_product_(total_AB: Tensor, left_AC: Tensor, right_CB: Tensor) -> None:
    """Total += left · right, with the total in float32 and without a second matrix of its size."""
    if left_AC.dtype == total_AB.dtype:
        total_AB.addmm_(left_AC, right_CB)
    elif total_AB.is_cuda:
        torch.addmm(total_AB, left_AC, right_CB, out_dtype=total_AB.dtype, out=total_AB)
    else:
        # PyTorch has no such product on the CPU. Blocks, each rounded once, keep their room small,
        # and that of the float32 copies that add_ makes of them.
        for begin in range(0, len(total_AB), PRODUCT_ROWS):
            block = slice(begin, begin + PRODUCT_ROWS)
            total_AB[block].add_(torch.mm(left_AC[block], right_CB))


def _placeholder(weight_VH: Tensor) -> Tensor:
    """The gradient that stands for one already in ``main_grad``, as Megatron's fused layers do.

    Megatron's hook drops it, but autograd must bring it so that the hook runs. With
    ``zero_out_wgrad`` (tied embeddings) the hook adds it, together with the embedding's gradient.
    """
    weight_VH.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight_VH, "zero_out_wgrad", False):
        return torch.zeros_like(weight_VH)
    return torch.empty_like(weight_VH)


def _float32_zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def _split(target_T: Tensor, chunk_tokens: int) -> Iterator[slice]:
    for begin in range(0, len(target_T), chunk_tokens):
        yield slice(begin, min(begin + chunk_tokens, len(target_T)))
