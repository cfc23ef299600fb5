"""KL divergence to a reference, estimated on sampled tokens.

With x = ℓ − ℓ_ref of a token that the policy sampled, each estimates KL(π‖π_ref): k1 is unbiased,
k3 is unbiased and never negative, k2 is biased where x is large (Schulman, "Approximating KL
divergence", 2020). As losses they differ again: only the derivative of k2 with respect to ℓ gives
an unbiased gradient of the divergence, which is why ``k1+`` and ``k3+`` use it.

Shape legend: T = response tokens of a micro-batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import LOG_RATIO_LIMIT


class KlEstimate(NamedTuple):
    """Estimates for tokens, and their derivatives."""

    value_T: Tensor
    """[T] nats."""
    by_logprob_T: Tensor
    """[T] ∂value/∂ℓ as the loss uses it; for ``k1+`` and ``k3+`` that of ``k2``."""


def estimate_kl(kind: str, logprob_T: Tensor, reference_T: Tensor) -> KlEstimate:
    """Estimate KL(π‖π_ref) at each token, in float64, because the terms of k3 cancel.

    Args:
        kind: ``k1`` x, derivative 1; ``k2`` x²/2, derivative x; ``k3`` e^−x − 1 + x, derivative 1 −
            e^−x, with x clamped to ±20 as in ratios (derivative 0 beyond); ``k1+``, ``k3+`` the
            values of k1 and k3 with the derivative of k2.
        logprob_T: [T] ℓ, detached.
        reference_T: [T] ℓ_ref.

    Returns:
        Value and derivative, [T] each, in the dtype of ``logprob_T``.
    """
    x_T = logprob_T.double() - reference_T.double()
    values = {"k1": x_T, "k2": x_T.square() / 2}
    derivatives = {"k1": torch.ones_like(x_T), "k2": x_T}
    if kind.startswith("k3"):
        limited_T = x_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        inverse_T = torch.expm1(-limited_T)
        values["k3"] = inverse_T + limited_T
        derivatives["k3"] = torch.where(limited_T == x_T, -inverse_T, 0.0)
    derivative_T = x_T if kind.endswith("+") else derivatives[kind]
    dtype = logprob_T.dtype
    return KlEstimate(values[kind.removesuffix("+")].to(dtype), derivative_T.to(dtype))
