"""Values that are not finite: where they are, and which is the first.

Shape legend: T = response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
