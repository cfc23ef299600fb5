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
