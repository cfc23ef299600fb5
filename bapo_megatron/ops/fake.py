"""What ``torch.ops.bapo`` returns for tensors without data: shapes, types and devices.

torch.compile, export and ``opcheck`` run these. Shape legend: T = tokens, P = ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BOUNDS_FIELDS = (
    "low",
    "high",
    "positive_share_start",
    "positive_share",
    "exit",
    "nonfinite_tokens",
    "out_of_range_tokens",
    "tokens",
)
"""What a tensor of bounds holds, in order (csrc/common/params.h); float64."""


def _logprob_partials(
    logits: Tensor,
    rows: Tensor | None,
    target_T: Tensor,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
) -> Tensor:
    return logits.new_empty((target_T.shape[0], 4), dtype=torch.float32)


def _logprob_combine(
    partials_PT4: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def new() -> Tensor:
        return partials_PT4.new_empty(partials_PT4.shape[1])

    return new(), new(), new(), new()


def _logits_backward_(
    logits: Tensor,
    rows: Tensor | None,
    target: Tensor,
    max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
) -> None:
    return None


def _contributions_(
    table: Tensor,
    grid: Tensor,
    logprob: Tensor,
    behaviour_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    weight: str,
) -> None:
    return None


def _search_bounds(
    table: Tensor, grid: Tensor, target: float, contribution: str, measure: str
) -> Tensor:
    return table.new_empty(len(BOUNDS_FIELDS), dtype=torch.float64)


def _importance_ratio(logprob_T: Tensor, behaviour_logprob: Tensor) -> Tensor:
    return torch.empty_like(logprob_T)


_FAKES: dict[str, Callable[..., Any]] = {
    "logprob_partials": _logprob_partials,
    "logprob_combine": _logprob_combine,
    "logits_backward_": _logits_backward_,
    "contributions_": _contributions_,
    "search_bounds": _search_bounds,
    "importance_ratio": _importance_ratio,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"bapo::{_name}", _fake)
