"""Importance ratio (stand-in)."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def importance_ratio(
    logprob_T: Tensor, behaviour_logprob_T: Tensor, kernels: object = None
) -> Tensor:
    """Stand in."""
    return (logprob_T - behaviour_logprob_T).clamp(-20, 20).double().exp().to(logprob_T.dtype)
