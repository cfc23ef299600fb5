"""Objectives that need quantiles or moments of an update: M2PO, and training on high entropy only.

Both take a threshold from an integer histogram with fixed bins, whose sum does not depend on ranks
or micro-batches. The threshold is the edge of a bin; a sort would place it within that bin.
Shape legend: T = response tokens, K = entries of a statistic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from bapo_megatron.algorithm.objective import (
    LOG_RATIO_LIMIT,
    NamedObjective,
    Objective,
    Speculate,
    TokenBatch,
)
from bapo_megatron.algorithm.objectives.clip import Clip, bound_metrics
from bapo_megatron.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

BIN_WIDTH = 2.0**-10
"""Width of a bin of |ℓ − μ|, and of one of the entropy, in nats."""

LOG_RATIO_BINS = int(LOG_RATIO_LIMIT / BIN_WIDTH)
"""Up to the clamp of ℓ − μ."""

ENTROPY_BINS = int(16 / BIN_WIDTH)
"""The entropy over 8.9 million tokens is at most 16 nats; the last bin holds what is above."""

MOMENT_UNIT = 2.0**-24
"""Resolution of sums of x²: 2^29 tokens of an update fit in int64, whatever their x ≤ 20."""


def _bins(value_T: Tensor, num_bins: int) -> Tensor:
    return (value_T / BIN_WIDTH).long().clamp(max=num_bins - 1)


def _from_each_bin(count_K: Tensor) -> Tensor:
    return count_K.flip(0).cumsum(0).flip(0)


class M2poConfig(Section):
    """M2PO bounds r so that the second moment of ℓ − μ keeps to a budget."""

    budget: float = Field(0.04, gt=0)
    """Largest mean of min((ℓ − μ)², τ²) over the tokens that move outwards."""
    max_low: float = Field(0.7, ge=0, le=1)
    """The lower bound is never above this."""
    min_high: float = Field(1.5, ge=1)
    """The upper bound is never below this."""
    speculate: Speculate = "auto"
    """As in ``bapo``; where τ moves a bound beyond its limit, predictions are seldom right."""


class M2po(Clip):
    """PPO's loss with bounds from the second moment of x = ℓ − μ (arXiv 2510.01161).

    Of the tokens that move outwards (A > 0 and x > 0, or A < 0 and x < 0), τ is the largest for
    which the mean of min(x², τ²) keeps to the budget, to within a bin of 2^-10 below. The bounds
    are c_low = min(e^−τ, ``max_low``) and c_high = max(e^τ, ``min_high``). Where the mean of x²
    itself keeps to the budget, or no token moves outwards, there are no bounds. The release decides
    per micro-batch; here it is once per update.
    """

    needs = "update"
    decisive = slice(0, 2)

    def __init__(self, options: M2poConfig, dual_clip: float | None) -> None:
        """Take the budget and the narrowest bounds."""
        self.options = options
        self.speculate = options.speculate
        self.dual_clip = dual_clip

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return the number of outward tokens in each bin of |x|, then their sums of x², int64."""
        x_T = tokens.logprob - tokens.behaviour_logprob
        size_T = x_T.abs().clamp(max=LOG_RATIO_LIMIT)
        counted_T = ((tokens.mask > 0) & (tokens.advantage * x_T > 0)).long()
        square_T = (size_T.double().square() / MOMENT_UNIT).round().long()
        bins_T = _bins(size_T, LOG_RATIO_BINS)
        total_K = counted_T.new_zeros(2 * LOG_RATIO_BINS)
        total_K.index_add_(0, bins_T, counted_T)
        return total_K.index_add_(0, bins_T + LOG_RATIO_BINS, square_T * counted_T)

    def decide(self, total_K: Tensor) -> Tensor:
        """Return c_low, c_high, the mean of x², and 1 if there are bounds: [4] float64."""
        import torch

        count_K, square_K = total_K.view(2, LOG_RATIO_BINS)
        edge_K = torch.arange(LOG_RATIO_BINS, dtype=torch.float64, device=total_K.device)
        edge_K = edge_K * BIN_WIDTH
        # Σ min(x², τ²) for τ at the lower edge of each bin; it never falls.
        below_K = (square_K.cumsum(0) - square_K).double() * MOMENT_UNIT
        limited_K = below_K + _from_each_bin(count_K).double() * edge_K.square()
        total, count = square_K.sum().double() * MOMENT_UNIT, count_K.sum().double()
        allowed = self.options.budget * count
        tau = ((limited_K <= allowed).sum() - 1).double() * BIN_WIDTH
        is_bounded = total > allowed
        low = torch.where(is_bounded, torch.exp(-tau).clamp(max=self.options.max_low), 0.0)
        high = torch.where(is_bounded, torch.exp(tau).clamp(min=self.options.min_high), torch.inf)
        return torch.stack([low, high, total / count.clamp(min=1), is_bounded.double()])

    def foresee(self, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
        """Take the moments of recent updates; with ℓ = μ no token moves."""
        return known_K if recent_K is None else recent_K

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the bounds of the update."""
        assert tokens.decision is not None, "the bounds are decided before the loss"
        low, high, _, _ = tokens.decision.to(tokens.ratio.dtype)
        return low, high

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return the mean of x² and whether there are bounds; if so, the bounds."""
        low, high, moment, is_bounded = decision
        reported = {"m2po/second_moment": moment, "m2po/bounded_share": is_bounded}
        return reported | (bound_metrics(low, high) if is_bounded else {})


class HighEntropy(Objective):
    """Trains the tokens of an update with the highest entropy, by another objective.

    The 80/20 rule (arXiv 2506.01939) with a share of 0.2. The threshold is the lower edge of the
    bin that holds the k-th largest entropy, k = ⌈share · tokens⌉: at least the share trains. All
    tokens with m = 1 are counted. The denominators of the loss count the tokens that train. The
    inner objective still decides over all tokens.
    """

    needs = "update"
    selects_tokens = True

    def __init__(self, inner: Objective, share: float) -> None:
        """Take the share of tokens, above 0 and below 1, and an objective of tokens or updates."""
        assert inner.needs in ("token", "update"), "other sums are formed over all tokens"
        self.inner, self.share = inner, share
        self.trains_zero_advantage = inner.trains_zero_advantage
        self.centers = inner.centers

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return the number of tokens in each bin of the entropy, then the inner statistics."""
        import torch

        counted_T = (tokens.mask > 0).long()
        count_K = counted_T.new_zeros(ENTROPY_BINS)
        count_K.index_add_(0, _bins(tokens.entropy, ENTROPY_BINS), counted_T)
        if self.inner.needs == "token":
            return count_K
        return torch.cat([count_K, self.inner.statistics(tokens)])

    def decide(self, total_K: Tensor) -> Tensor:
        """Return the first bin that trains, the share of tokens that do, the inner decision."""
        import torch

        from_K = _from_each_bin(total_K[:ENTROPY_BINS]).double()
        first = (from_K >= self.share * from_K[0]).sum() - 1
        # A tensor as index would be read on the host.
        kept_share = from_K.gather(0, first[None])[0] / from_K[0].clamp(min=1)
        threshold = torch.stack([first.double(), kept_share])
        if self.inner.needs == "token":
            return threshold
        return torch.cat([threshold, self.inner.decide(total_K[ENTROPY_BINS:])])

    def select(self, tokens: TokenBatch) -> Tensor:
        """Return which tokens train, [T] bool."""
        assert tokens.decision is not None, "the threshold is decided before the loss"
        selected_T = _bins(tokens.collected_entropy, ENTROPY_BINS) >= tokens.decision[0]
        if self.inner.selects_tokens:
            selected_T &= self.inner.select(self._for_inner(tokens))
        return selected_T

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the inner objective's loss, [T]."""
        return self.inner.loss(self._for_inner(tokens))

    def weights(self, tokens: TokenBatch, ratio_TK: Tensor) -> Tensor:
        """Return the inner objective's weights, [T, K]."""
        return self.inner.weights(self._for_inner(tokens), ratio_TK)

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor] | None:
        """Return the inner objective's bounds."""
        return self.inner.bounds(self._for_inner(tokens))

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return the inner objective's values."""
        return self.inner.report(self._for_inner(tokens))

    def guarded(self) -> AbstractContextManager[None]:
        """Return the inner objective's context."""
        return self.inner.guarded()

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return the threshold, the share of tokens that train, and the inner metrics."""
        first, kept, *inner = decision
        values = {"entropy_share/threshold": first * BIN_WIDTH, "entropy_share/kept_share": kept}
        return {**values, **self.inner.report_decision(inner)}

    def refuses(self, decision: Tensor) -> Tensor | None:
        """Return whether the inner objective refuses."""
        return self.inner.refuses(decision[2:]) if self.inner.needs == "update" else None

    def explain_refusal(self, decision: Sequence[float]) -> str:
        """Say why the inner objective refuses."""
        return self.inner.explain_refusal(decision[2:])

    def _for_inner(self, tokens: TokenBatch) -> TokenBatch:
        if tokens.decision is None or self.inner.needs == "token":
            return replace(tokens, decision=None)
        return replace(tokens, decision=tokens.decision[2:])


NAMED = {"m2po": NamedObjective(lambda o, c: M2po(o, c.dual_clip), M2poConfig, dual_clip=True)}
