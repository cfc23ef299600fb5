"""Readable float64 versions of what the kernels compute, on one device and without tricks.

They share no code with the kernels; tests compare against them, and people can read them as the
specification. Shape legend: T = response tokens, V = vocabulary columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.floating]


def logprobs_and_entropy(
    logits_TV: Tensor, target_T: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy through a float64 log-softmax, differentiable by autograd.

    Args:
        logits_TV: [T, V ≥ vocab_size] whole logits; columns from ``vocab_size`` on are padding.
        target_T: [T] int64 vocabulary ids.
        vocab_size: True vocabulary size.
        temperature: Logits are divided by it.

    Returns:
        Log-probs [T] and entropies [T], float64.
    """
    scaled_TV = logits_TV[:, :vocab_size].double() / temperature
    log_prob_TV = torch.log_softmax(scaled_TV, dim=1)
    logprob_T = log_prob_TV.gather(1, target_T[:, None]).squeeze(1)
    # p · log p is 0 where p is 0; the double where keeps NaN out of the gradient too.
    finite_TV = torch.isfinite(log_prob_TV)
    safe_TV = torch.where(finite_TV, log_prob_TV, 0.0)
    entropy_T = -torch.where(finite_TV, safe_TV.exp() * safe_TV, 0.0).sum(dim=1)
    return logprob_T, entropy_T


def positive_and_negative_sums(
    ratio_T: FloatArray,
    weighted_advantage_T: FloatArray,
    clip_low: float,
    clip_high: float,
    *,
    contribution: str,
    dual_clip: float | None = None,
) -> tuple[float, float]:
    """Compute P and N for one pair of bounds, in float64.

    ``surrogate`` (Eq. 8): P = Σ_{wA>0} wA·min(r, c_high), N = Σ_{wA<0} |wA|·max(r, c_low).
    ``gradient`` (Eq. 5): P = Σ_{wA>0, r<c_high} wA·r, N = Σ_{wA<0, c_low<r≤dual_clip} |wA|·r.

    Args:
        ratio_T: [T] importance ratios.
        weighted_advantage_T: [T] w·A.
        clip_low: c_low.
        clip_high: c_high.
        contribution: ``surrogate`` or ``gradient``.
        dual_clip: Upper limit for negative advantages (``gradient`` only), or None.
    """
    ratio_T = np.asarray(ratio_T, dtype=np.float64)
    weighted_T = np.asarray(weighted_advantage_T, dtype=np.float64)
    positive_T, negative_T = np.maximum(weighted_T, 0), np.maximum(-weighted_T, 0)
    if contribution == "surrogate":
        positive = positive_T * np.minimum(ratio_T, clip_high)
        negative = negative_T * np.maximum(ratio_T, clip_low)
    elif contribution == "gradient":
        limit = np.inf if dual_clip is None else dual_clip
        positive = positive_T * ratio_T * (ratio_T < clip_high)
        negative = negative_T * ratio_T * ((ratio_T > clip_low) & (ratio_T <= limit))
    else:
        raise ValueError(f"contribution must be surrogate or gradient, got {contribution!r}")
    return float(positive.sum()), float(negative.sum())
