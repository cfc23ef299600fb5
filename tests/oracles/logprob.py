"""Log-probs, entropies and the gradient of the logits in float64, from whole rows.

Shape legend: N = rows of logits, V = true vocabulary, T = tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Token64(NamedTuple):
    """Float64 results for T tokens; a row with NaN or +inf gives NaN."""

    logprob_T: Tensor
    entropy_T: Tensor
    logprobs_TV: Tensor


def token_logprobs(logits_TV: Tensor, target_T: Tensor, temperature: float = 1.0) -> Token64:
    """log softmax(x / temperature) at the target, and −Σ p log p with 0 log 0 = 0."""
    logprobs_TV = torch.log_softmax(logits_TV.double() / temperature, dim=-1)
    terms_TV = torch.where(logprobs_TV == -torch.inf, 0.0, logprobs_TV.exp() * logprobs_TV)
    logprob_T = logprobs_TV.gather(1, target_T[:, None]).squeeze(1)
    return Token64(logprob_T, -terms_TV.sum(-1), logprobs_TV)


class Gradient64(NamedTuple):
    """d loss / d logits, and the size of the terms that it is the sum of."""

    gradient_TV: Tensor
    term_size_TV: Tensor


def logits_gradient(
    logits_TV: Tensor,
    target_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    temperature: float = 1.0,
) -> Gradient64:
    """Gradient of Σ grad_logprob · logprob + grad_entropy · entropy by the logits.

    d logprob / d x_j = ([j = y] − p_j) / τ and d H / d x_j = −p_j (log p_j + H) / τ.
    """
    tokens = token_logprobs(logits_TV, target_T, temperature)
    log_p = torch.where(tokens.logprobs_TV == -torch.inf, 0.0, tokens.logprobs_TV)
    p = tokens.logprobs_TV.exp()
    at_target = torch.zeros_like(p).scatter_(1, target_T[:, None], 1.0)
    g = grad_logprob_T.double()[:, None]
    h = grad_entropy_T.double()[:, None]
    entropy = tokens.entropy_T[:, None]
    gradient = (g * (at_target - p) - h * p * (log_p + entropy)) / temperature
    size = (g.abs() * (at_target + p) + h.abs() * p * (log_p.abs() + entropy)) / temperature
    return Gradient64(gradient, size)


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` around each float64 value."""
    info = torch.finfo(dtype)
    magnitude = values.abs().clamp_min(info.tiny)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps
