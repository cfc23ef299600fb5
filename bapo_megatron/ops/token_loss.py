"""The border between kernels over the vocabulary and a loss over tokens.

A ``TokenLoss`` turns log-probs and entropies of tokens into a number and its derivatives. The
kernels know nothing else of it: ``apply_token_loss`` hands the derivatives to autograd, and the
chunked path (``ops.chunked``) spreads them over the logits of each chunk.

Shape legend: T = response tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class LossGradient(NamedTuple):
    """A loss, summed over tokens, and its derivatives; nothing has a graph."""

    loss: Tensor
    """float64, no dimensions."""
    logprob_T: Tensor
    """[T] ∂loss/∂ℓ."""
    entropy_T: Tensor | None
    """[T] ∂loss/∂H; None where the loss does not depend on the entropy."""


class TokenLoss(Protocol):
    """The loss of a part of the tokens of a micro-batch; sums over parts are the whole."""

    def __call__(self, logprob_T: Tensor, entropy_T: Tensor, part: slice) -> LossGradient:
        """Compute it for the tokens ``part``, at least one, whose ℓ and H are given, detached."""
        ...


def apply_token_loss(logprob_T: Tensor, entropy_T: Tensor, token_loss: TokenLoss) -> Tensor:
    """Return the loss of all tokens, a scalar in the log-probs' dtype, differentiable in both.

    Args:
        logprob_T: [T] ℓ, with a graph.
        entropy_T: [T] H, with a graph; no gradient reaches it where the loss does not depend on it.
        token_loss: Is not called where there is no token: the loss is 0 then.
    """
    loss: Tensor = _AppliedLoss.apply(logprob_T, entropy_T, token_loss)  # type: ignore[no-untyped-call]
    return loss


class _AppliedLoss(torch.autograd.Function):
    """Keeps one or two floats per token: the derivatives, which the forward pass knows."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logprob_T: Tensor, entropy_T: Tensor, token_loss: TokenLoss
    ) -> Tensor:
        if len(logprob_T) == 0:
            ctx.save_for_backward(torch.zeros_like(logprob_T), None)  # type: ignore[arg-type]
            return logprob_T.new_zeros(())
        loss, by_logprob_T, by_entropy_T = token_loss(
            logprob_T.detach(), entropy_T.detach(), slice(0, len(logprob_T))
        )
        ctx.save_for_backward(by_logprob_T, by_entropy_T)  # type: ignore[arg-type]  # may be None
        # A tensor of its own: Megatron's pipelines free outputs and refuse views.
        return loss.to(logprob_T.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        by_logprob_T, by_entropy_T = ctx.saved_tensors  # type: ignore[attr-defined]
        by_entropy_T = None if by_entropy_T is None else by_entropy_T * grad_loss
        return by_logprob_T * grad_loss, by_entropy_T, None
