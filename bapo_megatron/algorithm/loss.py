"""The weights of token losses: from the aggregation, and from the correction.

The loss of an update is Σ_t weight_t · loss_t over all its tokens, on every rank and in every
micro-batch. Weights hold the *global* denominators, so partial sums simply add up: neither
micro-batching nor the number of ranks changes the gradient. What one token contributes is the
objective's (``algorithm.objective``).

The correction is for what lies between the trainer's log-probs and the engine's. With μ recomputed
by the trainer at the start of the step and π_rollout as the engine recorded it, a token has the
importance weight w = exp(clamp(μ − log π_rollout, ±20)). It holds the engine's different arithmetic
and, for tokens that older weights sampled, their staleness. It multiplies the policy loss of the
token and nothing else.

Shape legend: T = response tokens of a micro-batch, R = responses of an update.
"""

from typing import Literal

import torch
from torch import Tensor

from bapo_megatron.config.schema import CorrectionConfig
from bapo_megatron.ops.ratio import LOG_RATIO_LIMIT

Aggregation = Literal["token_mean", "sequence_mean", "token_sum_norm"]


def token_weights(
    mask_T: Tensor,
    response_tokens_T: Tensor,
    aggregation: Aggregation,
    response_tokens_R: Tensor,
    constant: float = 1.0,
) -> Tensor:
    """Weight each token so that Σ_t weight_t · loss_t over the whole update is its loss.

    Nothing waits for the device. A response counts where at least one of its tokens trains.

    - ``token_mean``: m / Σm of all responses;
    - ``sequence_mean``: m / (Σm of the token's response · responses), the mean of response means;
    - ``token_sum_norm``: m / (responses · constant).

    Args:
        mask_T: [T], 1 for tokens that train, else 0.
        response_tokens_T: [T] Σm over the *whole* response that the token belongs to, also where
            context parallelism or masking leaves only a part of it here.
        aggregation: How token losses are combined.
        response_tokens_R: [R] Σm of every response of the whole update: of all micro-batches of all
            data- and context-parallel ranks, each once.
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
        recomputed_T: [T] log-prob by the trainer at the start of the step.
        rollout_T: [T] log-prob by the engine.
        mask_T: [T], 1 for tokens that train, else 0.
    """
    log_weight_T = recomputed_T - rollout_T
    counts_T = (mask_T > 0) & log_weight_T.isfinite()
    return torch.where(counts_T, log_weight_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def limit_weights(importance_T: Tensor, config: CorrectionConfig) -> Tensor:
    """Return what the policy loss of every token is multiplied by, [T].

    - ``token``, ``sequence``: min(w, cap);
    - ``icepop``: w where low ≤ w ≤ high, else 0;
    - ``geometric``: 1 where low ≤ w ≤ high, else 0.

    Args:
        importance_T: [T] w of the token, or of its response ∏ w or the geometric mean of w.
        config: Kind and limits; not ``none``.
    """
    if config.kind in ("token", "sequence"):
        return importance_T.clamp(max=config.cap)
    inside_T = (importance_T >= config.low) & (importance_T <= config.high)
    return torch.where(inside_T, importance_T if config.kind == "icepop" else 1.0, 0.0)
