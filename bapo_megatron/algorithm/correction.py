"""Importance weights for what lies between the trainer's log-probs and the engine's.

With μ recomputed by the trainer at the start of the step and π_rollout as the engine recorded it,
the weight of a token is w = exp(clamp(μ − log π_rollout, ±20)). It holds the engine's different
arithmetic and, for tokens that older weights sampled, their staleness. It multiplies the policy
loss of the token and nothing else.

Shape legend: T = response tokens of a micro-batch, B = samples of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.config.schema import CorrectionConfig

LOG_LIMIT = 20.0
"""|log w| is clamped to it, like the log of the importance ratio."""

LOG_UNIT = 2.0**-36
"""Resolution of summed log weights. Sums are integers, so they do not depend on the order of
tokens: ranks that hold the same layers get the same weights. At ±20, 2^22 tokens fit in int64."""


def log_weights(recomputed_T: Tensor, rollout_T: Tensor, mask_T: Tensor) -> Tensor:
    """Log of w of every token, [T] float32; 0 where the mask is 0 or a log-prob is not finite.

    Args:
        recomputed_T: [T] log-prob by the trainer at the start of the step.
        rollout_T: [T] log-prob by the engine.
        mask_T: [T], 1 for tokens that train, else 0.
    """
    log_weight_T = recomputed_T - rollout_T
    counts_T = (mask_T > 0) & log_weight_T.isfinite()
    return torch.where(counts_T, log_weight_T.clamp(-LOG_LIMIT, LOG_LIMIT), 0.0)


def add_log_weights(sum_B: Tensor, log_weight_T: Tensor, sample_T: Tensor) -> None:
    """Add the log weights of a part of the tokens to the sums of their responses.

    Sums of several ranks that hold parts of the same responses are added up.

    Args:
        sum_B: [B] int64, in units of ``LOG_UNIT``; changed in place.
        log_weight_T: [T] from ``log_weights``.
        sample_T: [T] int64 index of each token's sample.
    """
    units_T = (log_weight_T.double() / LOG_UNIT).round().to(torch.int64)
    sum_B.index_add_(0, sample_T, units_T)


def sequence_log_weights(sum_B: Tensor, sample_T: Tensor) -> Tensor:
    """Log of ∏ w over the response of every token, [T] float32, clamped like that of a token."""
    log_weight_B = (sum_B.double() * LOG_UNIT).clamp(-LOG_LIMIT, LOG_LIMIT)
    return log_weight_B.float()[sample_T]


def limit_weights(importance_T: Tensor, config: CorrectionConfig) -> Tensor:
    """Return what the policy loss of every token is multiplied by, [T].

    - ``token``, ``sequence``: min(w, cap);
    - ``icepop``: w where low ≤ w ≤ high, else 0.

    Args:
        importance_T: [T] w of the token, or ∏ w of its response.
        config: Kind and limits; not ``none``.
    """
    if config.kind == "icepop":
        inside_T = (importance_T >= config.low) & (importance_T <= config.high)
        return torch.where(inside_T, importance_T, 0.0)
    return importance_T.clamp(max=config.cap)
