"""Log-prob, entropy and importance ratio of response tokens, and a loss over them.

Each rank of the tensor-parallel group holds the columns [V · rank, V · (rank + 1)) of the padded
vocabulary. A rank reduces its columns to four numbers per token, one all-gather of [T, 4] exchanges
them, and every rank merges them in rank order (csrc/README.md has the formulae). The backward needs
no collective: it computes each logit's gradient from the logit and three numbers per token.

To the kernels a loss over tokens is a ``TokenLoss``: a function from log-probs and entropies to a
number and its derivatives. ``apply_token_loss`` applies it to log-probs of whole logits,
``ops.chunked`` to hidden states.

Shape legend: N = rows of the logits, V = local columns, T = response tokens, P = ranks of the
group.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.ops import extension  # noqa: F401  (registers the operations)

LOG_RATIO_LIMIT = 20.0
"""|ℓ − μ| is clamped to this before the exponential, as in csrc/common/contribution.h."""


class TokenLogprobs(NamedTuple):
    """What the policy says about each response token."""

    logprob_T: Tensor
    """[T] log-prob of the target at the given temperature."""
    entropy_T: Tensor
    """[T] entropy of the distribution at the given temperature, in nats."""


class Columns(NamedTuple):
    """Which part of the vocabulary this rank holds, and how logits are scaled."""

    start: int
    """Vocabulary id of local column 0."""
    vocab_size: int
    """True size of the vocabulary; columns from here on are padding."""
    temperature: float


def columns_of_rank(
    num_columns: int, vocab_size: int, temperature: float, group: dist.ProcessGroup | None
) -> Columns:
    """Return the columns of this rank; all ranks of the group have equally many."""
    rank = 0 if group is None else dist.get_rank(group)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    assert 0 < vocab_size <= num_columns * num_ranks, "pass the vocabulary size without padding"
    return Columns(rank * num_columns, vocab_size, temperature)


def vocab_parallel_logprobs(
    logits_NV: Tensor,
    target_T: Tensor,
    *,
    vocab_size: int,
    rows_T: Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    overwrite_logits: bool = False,
) -> TokenLogprobs:
    """Compute log-prob and entropy of the targets, differentiable in the logits.

    A collective: every rank of ``group`` calls it with the same targets, rows and temperature, even
    with zero tokens. It computes in float32. The gradient of the entropy is only computed where
    something depends on the entropy. NaN and +inf logits make the token's results NaN; a −inf logit
    adds nothing. Double backward is not supported.

    With ``overwrite_logits`` the backward writes the gradient over the logits, whose values are
    then gone: nothing else may need them. It bumps their version, so that autograd refuses a second
    backward, and the backward of whatever else saved them.

    Args:
        logits_NV: [N, V] this rank's columns; float32, bfloat16 or float16.
        target_T: [T] int64 global vocabulary ids.
        vocab_size: True vocabulary size, without padding columns.
        rows_T: [T] int64, the row of the logits that predicts each target, each at most once; None:
            row t for target t.
        temperature: Logits are divided by it, > 0.
        group: The tensor-parallel group; None: the logits have all columns.
        overwrite_logits: Write the gradient over the logits instead of into a copy.

    Returns:
        Log-probs and entropies, equal on all ranks of the group.

    Raises:
        RuntimeError: For shapes or types that do not fit together, and for a target or row out of
            range (on the CPU; on a GPU, where the check would wait for the device, the token's
            results are NaN).
    """
    columns = columns_of_rank(logits_NV.shape[1], vocab_size, temperature, group)
    is_parameter = logits_NV.is_leaf and logits_NV.requires_grad
    assert not (overwrite_logits and is_parameter), "overwriting would destroy a leaf's value"
    logprob_T, entropy_T = _VocabParallelLogprobs.apply(
        logits_NV, target_T, rows_T, columns, group, overwrite_logits
    )
    return TokenLogprobs(logprob_T, entropy_T)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the logits as they are and three floats per token; recomputes the softmax backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_T: Tensor,
        rows_T: Tensor | None,
        columns: Columns,
        group: dist.ProcessGroup | None,
        overwrite_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        partials_T4 = torch.ops.bapo.logprob_partials(logits_NV, rows_T, target_T, *columns)
        logprob_T, entropy_T, max_T, log_sum_T = torch.ops.bapo.logprob_combine(
            gather_partials(partials_T4, group), columns.temperature
        )
        ctx.save_for_backward(logits_NV, target_T, rows_T, max_T, log_sum_T, entropy_T)
        ctx.columns, ctx.overwrite_logits = columns, overwrite_logits
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        logits_NV, target_T, rows_T, *softmax = ctx.saved_tensors
        if grad_logprob_T is None and grad_entropy_T is None:
            return None, None, None, None, None, None
        grad_NV = logits_NV.detach()
        if not ctx.overwrite_logits:
            grad_NV = grad_NV.clone(memory_format=torch.contiguous_format)
        gradients = (
            None if grad_T is None else grad_T.contiguous()
            for grad_T in (grad_logprob_T, grad_entropy_T)
        )
        torch.ops.bapo.logits_backward_(
            grad_NV, rows_T, target_T, *softmax, *gradients, *ctx.columns
        )
        if ctx.overwrite_logits:
            # Kernels do not bump the version, and a second backward would be wrong.
            torch.autograd.graph.increment_version(logits_NV)
        return grad_NV, None, None, None, None, None


def gather_partials(partials_TK: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the partials of all ranks, [P, T, K], in rank order; K is 4, with a teacher 8."""
    if group is None or dist.get_world_size(group) == 1:
        return partials_TK[None]
    partials_PTK = partials_TK.new_empty(dist.get_world_size(group), *partials_TK.shape)
    # gloo does not accept [P, T, K].
    dist.all_gather_into_tensor(partials_PTK.flatten(0, 1), partials_TK, group=group)
    return partials_PTK


def importance_ratio(logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
    """Return each token's importance ratio; nothing waits for the device.

        r = exp(clamp(ℓ − μ, ±20)),     ∂r/∂ℓ = r where |ℓ − μ| ≤ 20, else 0.

    In float32 r has the bits that ``ops.contributions`` compares with the candidate bounds, so a
    loss and the search agree on which tokens a bound clips.

    Args:
        logprob_T: [T] float32 or float64 (plain PyTorch, for ``gradcheck``), ℓ; differentiable.
        behaviour_logprob_T: [T] of the same dtype, μ; it gets no gradient.

    Returns:
        [T] of the same dtype. NaN, with derivative 0, where ℓ or μ is NaN or infinite.

    Raises:
        RuntimeError: For other dtypes or shapes, or tensors on two devices.
    """
    ratio_T: Tensor = _ImportanceRatio.apply(logprob_T, behaviour_logprob_T)
    return ratio_T


class _ImportanceRatio(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
        ratio_T: Tensor
        if logprob_T.dtype == torch.float64:
            difference_T = logprob_T - behaviour_logprob_T
            ratio_T = difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            is_finite_T = logprob_T.isfinite() & behaviour_logprob_T.isfinite()
            ratio_T = torch.where(is_finite_T, ratio_T, torch.nan)
        else:
            ratio_T = torch.ops.bapo.importance_ratio(
                logprob_T.contiguous(), behaviour_logprob_T.contiguous()
            )
        ctx.save_for_backward(logprob_T, behaviour_logprob_T, ratio_T)
        return ratio_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        logprob_T, behaviour_logprob_T, ratio_T = ctx.saved_tensors
        # False where ℓ or μ is not finite.
        moves_T = (logprob_T - behaviour_logprob_T).abs_() <= LOG_RATIO_LIMIT
        return torch.where(moves_T, grad_T * ratio_T, 0.0), None


class LossGradient(NamedTuple):
    """A loss, summed over tokens, and its derivatives; all detached."""

    loss: Tensor
    """float64, no dimensions."""
    logprob_T: Tensor
    """[T] ∂loss/∂ℓ."""
    entropy_T: Tensor | None
    """[T] ∂loss/∂H; None if the loss does not depend on the entropy."""
    kl_T: Tensor | None = None
    """[T] ∂loss/∂KL; None if the loss does not depend on the divergence from a teacher."""
    head_TK: Tensor | None = None
    """[T, K] ∂loss/∂ log-prob of the head's tokens; None if it does not depend on them."""


class TokenLoss(Protocol):
    """The loss of a part of a micro-batch's tokens; parts add up to the whole."""

    def __call__(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor,
        part: slice,
        kl_T: Tensor | None = None,
        head_TK: Tensor | None = None,
    ) -> LossGradient:
        """Compute it for the tokens ``part``, at least one, from their detached ℓ and H, [T].

        ``kl_T`` [T] is the KL divergence between policy and teacher, in nats; None without one.
        ``head_TK`` [T, K] has the log-probs of ``Chunks.head_TK``, −inf where there is no token.
        """
        ...


def apply_token_loss(logprob_T: Tensor, entropy_T: Tensor, token_loss: TokenLoss) -> Tensor:
    """Return the loss of all tokens, a scalar in the log-probs' dtype, differentiable in both.

    Args:
        logprob_T: [T] ℓ, with a graph.
        entropy_T: [T] H, with a graph; no gradient reaches it if the loss does not depend on it.
        token_loss: Not called without tokens; the loss is then 0.
    """
    loss: Tensor = _AppliedLoss.apply(logprob_T, entropy_T, token_loss)
    return loss


class _AppliedLoss(torch.autograd.Function):
    """Keeps one or two floats per token: the derivatives, from the forward pass."""

    @staticmethod
    def forward(ctx: Any, logprob_T: Tensor, entropy_T: Tensor, token_loss: TokenLoss) -> Tensor:
        if len(logprob_T) == 0:
            ctx.save_for_backward(torch.zeros_like(logprob_T), None)
            return logprob_T.new_zeros(())
        loss, by_logprob_T, by_entropy_T, *_ = token_loss(
            logprob_T.detach(), entropy_T.detach(), slice(0, len(logprob_T))
        )
        ctx.save_for_backward(by_logprob_T, by_entropy_T)
        # A tensor of its own: Megatron's pipelines free outputs and refuse views.
        return loss.to(logprob_T.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        by_logprob_T, by_entropy_T = ctx.saved_tensors
        by_entropy_T = None if by_entropy_T is None else by_entropy_T * grad_loss
        return by_logprob_T * grad_loss, by_entropy_T, None
