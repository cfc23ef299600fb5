"""The loss of an update: derivatives of token losses, sums over responses, and weights.

The loss of an update is Σ_t weight_t · loss_t over all its tokens, on every rank and in every
micro-batch. Weights hold the *global* denominators, so partial sums simply add up: neither
micro-batching nor the number of ranks changes the gradient. The objective
(``algorithm.objective``) defines the loss of a token.

The correction accounts for the difference between the trainer's log-probs and the engine's. With μ
recomputed by the trainer at the start of the step and π_rollout as the engine recorded it, a token
has the importance weight w = exp(clamp(μ − log π_rollout, ±20)). It covers the engine's different
arithmetic and the staleness of stale tokens, and scales the token's policy loss and nothing else.

Shape legend: T = response tokens of a micro-batch, B = responses of the step's batch, R = responses
of an update.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.config.schema import CorrectionConfig
from bapo_megatron.ops.logprob import LOG_RATIO_LIMIT, importance_ratio

SAFE_LOGPROB = -1.0
"""ℓ and μ of tokens that do not train, so that every objective is finite there."""

RESPONSE_UNIT = 2.0**-36
"""Resolution of sums over a response. They are integers, so they depend neither on the order of
tokens nor on the ranks that hold them."""

RESPONSE_LIMIT = 256.0
"""Terms are clamped to ±this, so that the sum over 2^18 tokens of a response fits in int64."""


class TokenGradient(NamedTuple):
    """Losses of tokens and the derivatives of their weighted sum; all detached."""

    ratio_T: Tensor
    """[T] r."""
    loss_T: Tensor
    """[T] loss of each token, without its weight."""
    logprob_T: Tensor
    """[T] ∂(Σ weight · loss)/∂ℓ."""
    entropy_T: Tensor | None
    """[T] ∂(Σ weight · loss)/∂H; None if the loss does not depend on the entropy."""


def differentiate(objective: Objective, tokens: TokenBatch, weight_T: Tensor) -> TokenGradient:
    """Compute the losses of tokens and their derivatives by autograd on leaves ℓ and H.

    Args:
        objective: What is differentiated.
        tokens: At least one; the ratio is recomputed with a graph.
        weight_T: [T] weight of each token in the sum, 0 for tokens that do not train.
    """
    with torch.enable_grad():
        logprob_T = tokens.logprob.detach().requires_grad_()
        entropy_T = tokens.entropy.detach().requires_grad_()
        ratio_T = importance_ratio(logprob_T, tokens.behaviour_logprob)
        leaves = replace(tokens, logprob=logprob_T, entropy=entropy_T, ratio=ratio_T)
        loss_T = objective.loss(leaves)
        with objective.guarded():
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss_T, [logprob_T, entropy_T], grad_outputs=weight_T, allow_unused=True
            )
    by_logprob_T, by_entropy_T = gradients
    if by_logprob_T is None:
        by_logprob_T = torch.zeros_like(weight_T)
    return TokenGradient(ratio_T.detach(), loss_T.detach(), by_logprob_T, by_entropy_T)


def sum_over_responses(
    parts: Iterable[tuple[Tensor, Tensor]], num_responses: int, device: torch.device
) -> Tensor:
    """Sum values of tokens over each response, exactly.

    Ranks that hold parts of the same responses add up their sums afterwards.

    Args:
        parts: For each micro-batch, values [T], finite, clamped to ±``RESPONSE_LIMIT``; and the
            index of each token's response, [T] int64.
        num_responses: B.
        device: Where all of them are; parts may be empty.

    Returns:
        [B] int64 in units of ``RESPONSE_UNIT``.
    """
    sum_B = torch.zeros(num_responses, dtype=torch.int64, device=device)
    for value_T, response_T in parts:
        limited_T = value_T.double().clamp(-RESPONSE_LIMIT, RESPONSE_LIMIT)
        sum_B.index_add_(0, response_T, (limited_T / RESPONSE_UNIT).round().to(torch.int64))
    return sum_B


def response_sums(sum_B: Tensor, response_T: Tensor) -> Tensor:
    """Return the sum of every token's response, [T] float64, from ``sum_over_responses``."""
    return (sum_B.double() * RESPONSE_UNIT)[response_T]


def with_sums(objective: Objective, tokens: TokenBatch) -> TokenBatch:
    """Add the sums or the decision that the objective needs to the tokens of a whole update."""
    if objective.needs == "token":
        return tokens
    statistics = objective.statistics(tokens)
    if objective.needs != "response":
        return replace(tokens, decision=objective.decide(statistics))
    num_responses = int(tokens.response.max()) + 1
    value_T = torch.where(tokens.mask > 0, statistics, 0.0)
    sum_B = sum_over_responses([(value_T, tokens.response)], num_responses, value_T.device)
    sums_T = response_sums(sum_B, tokens.response).to(tokens.logprob.dtype)
    return replace(tokens, response_sums=sums_T)


def is_finite(values: Tensor) -> Tensor:
    """Return where values are neither NaN nor infinite: ``isfinite`` in two launches, not four."""
    return (values - values) == 0


def first_nonfinite(values_T: Tensor, mask_T: Tensor) -> int | None:
    """Return the index of the first token with mask 1 whose value is NaN or infinite, or None.

    It waits for the device, so call it only to explain a failure that a count has shown.
    """
    index_K = torch.nonzero((mask_T > 0) & ~torch.isfinite(values_T))
    return int(index_K[0].item()) if index_K.numel() else None


def token_weights(
    mask_T: Tensor,
    response_tokens_T: Tensor,
    aggregation: str,
    response_tokens_R: Tensor,
    constant: float = 1.0,
) -> Tensor:
    """Weight each token so that Σ_t weight_t · loss_t over the whole update is its loss.

    Nothing waits for the device. A response counts if at least one of its tokens trains.

    - ``token_mean``: m / Σm of all responses;
    - ``sequence_mean``: m / (Σm of the token's response · responses), the mean of response means;
    - ``token_sum_norm``: m / (responses · constant).

    Args:
        mask_T: [T], 1 for tokens that train, else 0.
        response_tokens_T: [T] Σm over the *whole* response that the token belongs to, even if
            context parallelism or masking leaves only a part of it here.
        aggregation: How token losses are combined.
        response_tokens_R: [R] Σm of every response of the update, each once, over all micro-batches
            and data- and context-parallel ranks.
        constant: The constant of ``token_sum_norm``.

    Returns:
        [T] float32 weights, 0 where the mask is 0.
    """
    num_responses = (response_tokens_R > 0).sum()
    one_T = torch.ones_like(mask_T, dtype=torch.float64)
    if aggregation == "token_mean":
        divisor_T = one_T * response_tokens_R.sum()
    elif aggregation == "sequence_mean":
        divisor_T = response_tokens_T.to(torch.float64) * num_responses
    else:
        divisor_T = one_T * (num_responses * constant)
    return torch.where(mask_T > 0, 1.0 / divisor_T, 0.0).to(torch.float32)


def log_weights(recomputed_T: Tensor, rollout_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return log w of every token, [T] float32; 0 where m = 0 or a log-prob is not finite.

    Args:
        recomputed_T: [T] the trainer's log-prob at the start of the step.
        rollout_T: [T] the engine's log-prob.
        mask_T: [T], 1 for tokens that train, else 0.
    """
    log_weight_T = recomputed_T - rollout_T
    counts_T = (mask_T > 0) & log_weight_T.isfinite()
    return torch.where(counts_T, log_weight_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def limit_weights(importance_T: Tensor, config: CorrectionConfig) -> Tensor:
    """Return the factor of each token's policy loss, [T].

    - ``token``, ``sequence``: min(w, cap);
    - ``icepop``: w where low ≤ w ≤ high, else 0;
    - ``geometric``: 1 where low ≤ w ≤ high, else 0.

    Args:
        importance_T: [T] w of the token, or ∏ w or the geometric mean of w over its response.
        config: Kind and limits; not ``none``.
    """
    if config.kind in ("token", "sequence"):
        return importance_T.clamp(max=config.cap)
    inside_T = (importance_T >= config.low) & (importance_T <= config.high)
    return torch.where(inside_T, importance_T if config.kind == "icepop" else 1.0, 0.0)
