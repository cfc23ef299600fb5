"""Sums over the tokens that train.

Values under mask 0 never count, whatever they are: a NaN times zero would be NaN, so they are
replaced, not multiplied. Shape legend: T = response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum the values of tokens with mask 1, in float64.

    Args:
        values_T: [T] floats or booleans.
        mask_T: [T], 1 for tokens that train, else 0.

    Returns:
        Scalar float64.
    """
    return torch.where(mask_T > 0, values_T, 0).sum(dtype=torch.float64)


def masked_max(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the largest non-negative value of tokens with mask 1 (0 where there is none).

    Args:
        values_T: [T] floats, each ≥ 0 where the mask is 1.
        mask_T: [T], 1 for tokens that train, else 0.

    Returns:
        Scalar float64; NaN where a counted value is NaN.
    """
    counted_T = torch.where(mask_T > 0, values_T, 0).to(torch.float64)
    return counted_T.amax() if counted_T.numel() else counted_T.sum()


def is_finite(values: Tensor) -> Tensor:
    """Return where values are neither NaN nor infinite: ``isfinite`` in two launches, not four."""
    return (values - values) == 0


def first_nonfinite(values_T: Tensor, mask_T: Tensor) -> int | None:
    """Find the first token with mask 1 whose value is NaN or infinite.

    It waits for the device, so call it only to explain a failure that a count has shown.

    Args:
        values_T: [T] floats.
        mask_T: [T], 1 for tokens that train, else 0.

    Returns:
        Index of the token, or None.
    """
    index_K = torch.nonzero((mask_T > 0) & ~torch.isfinite(values_T))
    return int(index_K[0].item()) if index_K.numel() else None
