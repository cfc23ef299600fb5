"""Sampling: one token for each row, by the row's own uniform number, and that token's log-prob.

Shape legend: B = rows, V = vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.engine.base import SamplingSettings

BLOCK = 64
"""How many uniform numbers are drawn at once."""
_DRAWS_PER_COUNT = 4
"""64-bit numbers that Philox makes of one value of its counter."""


class Uniforms:
    """The random numbers of one response: number p depends on the seed and on p alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._number = -1
        self._block = np.empty(0)

    def block(self, number: int) -> np.ndarray:
        """[BLOCK] float64 in [0, 1), for the positions from ``number`` · BLOCK on."""
        if number != self._number:
            counter = number * (BLOCK // _DRAWS_PER_COUNT)
            philox = np.random.Philox(key=self._seed, counter=counter)
            self._block, self._number = np.random.Generator(philox).random(BLOCK), number
        return self._block


@dataclass(frozen=True, slots=True)
class Filters:
    """How rows sample, as tensors; None for what no row asks for."""

    temperature_B1: Tensor
    """[B, 1] float32; 1 where a row is greedy."""
    is_greedy_B1: Tensor | None
    top_p_B1: Tensor | None
    """[B, 1] float64; infinite where a row has none."""
    top_k_B1: Tensor | None
    """As ``top_p_B1``."""

    @classmethod
    def of_rows(cls, rows: Sequence[SamplingSettings], num_rows: int, device: torch.device) -> Self:
        """Combine the settings of rows; further rows are padding."""

        def column(values: list[float], default: float) -> Tensor:
            padded = values + [default] * (num_rows - len(values))
            return torch.tensor(padded, dtype=torch.float64, device=device)[:, None]

        is_greedy = [settings.temperature == 0 for settings in rows]
        is_filtered = any(settings.top_p < 1 or settings.top_k > 0 for settings in rows)
        top_p = [settings.top_p if settings.top_p < 1 else math.inf for settings in rows]
        top_k = [settings.top_k if settings.top_k > 0 else math.inf for settings in rows]
        return cls(
            temperature_B1=column([s.temperature or 1.0 for s in rows], 1.0).float(),
            is_greedy_B1=column([*is_greedy], 0.0).bool() if any(is_greedy) else None,
            top_p_B1=column(top_p, math.inf) if is_filtered else None,
            top_k_B1=column(top_k, math.inf) if is_filtered else None,
        )


def sample(logits_BV: Tensor, uniform_B1: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Invert each row's cumulative distribution at its uniform number, float64 in [0, 1).

    Returns:
        [B] int64 tokens, and [B] float32 log_softmax(logits / T) of them, whatever the filters.
    """
    logprob_BV = (logits_BV.float() / filters.temperature_B1).log_softmax(dim=-1)
    probability_BV = logprob_BV.exp()
    if filters.top_p_B1 is not None and filters.top_k_B1 is not None:
        _drop_unlikely(probability_BV, filters.top_p_B1, filters.top_k_B1)
    # In float64, so that the rounding of a long sum hides no token.
    cumulative_BV = probability_BV.cumsum(dim=-1, dtype=torch.float64)
    wanted_B1 = uniform_B1 * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, wanted_B1, right=True)
    token_B1.clamp_(max=logits_BV.shape[1] - 1)  # for a row that is not finite
    if filters.is_greedy_B1 is not None:
        greedy_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        token_B1 = torch.where(filters.is_greedy_B1, greedy_B1, token_B1)
    return token_B1[:, 0], logprob_BV.gather(1, token_B1)[:, 0]


def _drop_unlikely(probability_BV: Tensor, top_p_B1: Tensor, top_k_B1: Tensor) -> None:
    """Set to 0 what is not among the k most likely, or comes after those that sum up to p."""
    sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1, dtype=torch.float64) - sorted_BV
    rank_V = torch.arange(probability_BV.shape[1], device=probability_BV.device)
    is_dropped_BV = (before_BV > top_p_B1) | (rank_V >= top_k_B1)
    probability_BV.masked_fill_(
        torch.zeros_like(is_dropped_BV).scatter_(1, order_BV, is_dropped_BV), 0.0
    )
