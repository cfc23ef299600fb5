"""Objectives as a user would write them, outside the package (docs/algorithm.md).

Shape legend: T = tokens of a micro-batch or chunk.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.types import Sample


def cispo(tokens: TokenBatch, high: float = 1.2) -> Tensor:
    """CISPO: the clipped ratio weighs log-probs and has no gradient of its own."""
    weight = tokens.ratio.detach().clamp(max=high)
    return -tokens.advantage * weight * tokens.logprob


class Gspo(Objective):
    """GSPO: the ratio of a whole response, s = exp(mean x), clipped."""

    needs = "response"
    trains_zero_advantage = False

    def __init__(self, low: float = 3e-4, high: float = 4e-4) -> None:
        """Take the clip range of s."""
        self.low, self.high = low, high

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return x = ℓ − μ."""
        return tokens.logprob - tokens.behaviour_logprob

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −min(s A, clip(s) A), where s has the gradient of the token's own ℓ."""
        assert tokens.response_sums is not None
        mean = tokens.response_sums / tokens.response_tokens.clamp(min=1)
        s = torch.exp(mean + tokens.logprob - tokens.logprob.detach())
        clipped = s.clamp(1 - self.low, 1 + self.high)
        return -torch.minimum(s * tokens.advantage, clipped * tokens.advantage)

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return the mean log-ratio of the token's response."""
        assert tokens.response_sums is not None
        return {"gspo/log_ratio": tokens.response_sums / tokens.response_tokens.clamp(min=1)}


class HighEntropy(Objective):
    """80/20: only the tokens with the highest entropy train, by a histogram over the update."""

    needs = "update"
    selects_tokens = True
    bins, width = 64, 0.1

    def __init__(self, share: float = 0.2) -> None:
        """Take the share of tokens that train."""
        self.share = share

    def _bin(self, entropy: Tensor) -> Tensor:
        return (entropy / self.width).to(torch.int64).clamp(max=self.bins - 1)

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Count the tokens of each bin of entropy."""
        counts = torch.zeros(self.bins, dtype=torch.int64, device=tokens.mask.device)
        return counts.index_add_(0, self._bin(tokens.entropy), (tokens.mask > 0).to(torch.int64))

    def decide(self, total_K: Tensor) -> Tensor:
        """Return the first bin from which on at most the share of tokens lies."""
        above = total_K.flip(0).cumsum(0).flip(0)
        return (above > self.share * total_K.sum()).sum().to(torch.float64)[None]

    def select(self, tokens: TokenBatch) -> Tensor:
        """Keep the bins above."""
        assert tokens.decision is not None
        return self._bin(tokens.collected_entropy) >= tokens.decision[0]

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return the threshold."""
        return {"high_entropy/threshold": decision[0] * self.width}


class Anchor(Objective):
    """Pulls every token towards μ, whatever its advantage."""

    trains_zero_advantage = True

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return (ℓ − μ)²."""
        return (tokens.logprob - tokens.behaviour_logprob).square()


class BuiltIn(Objective):
    """An objective that has a name, checked as a user's is."""

    def __init__(self, algorithm: dict[str, Any]) -> None:
        """Take the ``algorithm`` section."""
        self.inner = load_objective(AlgorithmConfig.model_validate(algorithm)).objective
        self.needs = self.inner.needs
        self.selects_tokens = self.inner.selects_tokens
        # Those that select count tokens with A = 0.
        if not self.selects_tokens:
            self.trains_zero_advantage = self.inner.trains_zero_advantage
        for name in ("decide", "select", "bounds", "report", "report_decision", "refuses"):
            setattr(self, name, getattr(self.inner, name))

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return its loss."""
        return self.inner.loss(tokens)

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return its statistics."""
        return self.inner.statistics(tokens)


def rank_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Order of the rewards in the group, centred; shorter responses first where they tie."""
    lengths = torch.tensor([len(sample.response_token_ids) for sample in samples])
    order = (rewards - 1e-6 * lengths).argsort().argsort().double()
    return order - order.mean()


# What is refused, and why.


def whitens(tokens: TokenBatch) -> Tensor:
    """Mix tokens: the mean is that of whichever tokens come together."""
    advantage = tokens.advantage - tokens.advantage.mean()
    return -advantage * tokens.ratio


def sorts(tokens: TokenBatch) -> Tensor:
    """Mix tokens by their order."""
    return -tokens.advantage.cumsum(0) * tokens.ratio


def sums_up(tokens: TokenBatch) -> Tensor:
    """Return one number."""
    return (-tokens.advantage * tokens.ratio).sum()


def detached(tokens: TokenBatch) -> Tensor:
    """Lose the gradient."""
    return -tokens.advantage * tokens.ratio.detach()


def divides(tokens: TokenBatch) -> Tensor:
    """Give NaN where A is 0."""
    return -tokens.ratio * tokens.advantage * (tokens.advantage / tokens.advantage)


def raises(tokens: TokenBatch) -> Tensor:
    """Fail."""
    weights = {"positive": 1.0}
    return -tokens.advantage * tokens.ratio * weights["negative"]


def overwrites(tokens: TokenBatch) -> Tensor:
    """Change what belongs to the caller."""
    return -tokens.advantage.mul_(2) * tokens.ratio


def returns_a_number(tokens: TokenBatch) -> float:
    """Leave the graph."""
    return 0.0


def flat(tokens: TokenBatch) -> Tensor:
    """Have a gradient that is 0 everywhere."""
    return 0.0 * tokens.ratio


class NoLoss:
    """Lack what makes an objective."""


class SelectsUnseen(Objective):
    """Select tokens before any was seen."""

    selects_tokens = True

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio


class Bounded(Objective):
    """Name the limits that count for ``loss/positive_share``; the loss itself is not clipped."""

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return 0.5 and 2."""
        return torch.tensor(0.5), torch.tensor(2.0)


class ListOfBounds(Bounded):
    """Name the limits in a list."""

    def bounds(self, tokens: TokenBatch) -> Any:
        """Return 0.5 and 2 as numbers."""
        return [0.5, 2.0]


def fails_late(tokens: TokenBatch) -> Tensor:
    """Pass the trial and fail in training, where groups have other rewards."""
    if tokens.update >= 1:
        raise RuntimeError("the second update is too much")
    return -tokens.advantage * tokens.ratio


def nan_late(tokens: TokenBatch) -> Tensor:
    """Pass the trial and give NaN in training."""
    poison = float("nan") if tokens.update >= 1 else 1.0
    return -tokens.advantage * tokens.ratio * poison


def clamps_in_place(tokens: TokenBatch) -> Tensor:
    """Break the graph, which shows when it is differentiated."""
    return -tokens.advantage * tokens.ratio.clamp_(max=1.2)


class _FailingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ratio: Tensor) -> Tensor:
        return ratio.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("no gradient today")


def fails_backward(tokens: TokenBatch) -> Tensor:
    """Fail in the backward pass."""
    ratio: Tensor = _FailingGradient.apply(tokens.ratio)
    return -tokens.advantage * ratio


def clamps_entropy(tokens: TokenBatch) -> Tensor:
    """Change a field that the trainer reads again."""
    tokens.collected_entropy.clamp_(max=0.5)
    return -tokens.advantage * tokens.ratio


class OtherReports(Objective):
    """Report other names from time to time."""

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Name the number by the number of tokens."""
        return {f"other/{len(tokens)}": tokens.ratio}


class LateReports(OtherReports):
    """Report nothing of the first tokens, and a number of others."""

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Report nothing of the whole batch."""
        return {} if len(tokens) == 48 else super().report(tokens)


class TakenName(OtherReports):
    """Report under the name of another metric."""

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Take a name."""
        return {"policy/entropy": tokens.ratio}


class FailingBounds(OtherReports):
    """Fail where nothing but a metric is formed."""

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Report nothing."""
        return {}

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Fail."""
        raise LookupError("no bounds")


class FloatSelection(HighEntropy):
    """Select by weights."""

    def select(self, tokens: TokenBatch) -> Tensor:
        """Return floats."""
        return super().select(tokens).float()


class ScalarDecision(HighEntropy):
    """Decide without a dimension."""

    def decide(self, total_K: Tensor) -> Tensor:
        """Return a number."""
        return super().decide(total_K)[0]


class UnknownNeed(Objective):
    """Need something else."""

    needs = "batch"  # type: ignore[assignment]

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio


class NanStatistics(Gspo):
    """Pass the trial and sum up NaN in training."""

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Divide by 0 from the second update on."""
        x = tokens.logprob - tokens.behaviour_logprob
        return x / 0 * 0 if tokens.update >= 1 else x


def nan_entropy_late(tokens: TokenBatch) -> Tensor:
    """Pass the trial and have a derivative with respect to the entropy that is NaN in training."""
    root = (tokens.entropy.clamp(min=1e-3) * (0.0 if tokens.update >= 1 else 1.0)).sqrt()
    return -tokens.advantage * tokens.ratio - 0.0 * root


class FloatStatistics(HighEntropy):
    """Sum floats, whose sum depends on the order."""

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return a float."""
        return tokens.entropy.sum()[None]


class MaximumStatistics(HighEntropy):
    """Return what does not add up."""

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return the largest bin."""
        return self._bin(tokens.entropy).amax()[None].expand(self.bins).clone()


class NoStatistics(Objective):
    """Need sums and give none."""

    needs = "response"

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio


class AnchorsZero(Anchor):
    """Declare what is not true of the loss."""

    trains_zero_advantage = False

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return (ℓ − μ)²."""
        return super().loss(tokens)


class CountsZero(Objective):
    """Declare what is not true of the statistics."""

    needs = "update"
    trains_zero_advantage = False

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Count all tokens."""
        return (tokens.mask > 0).sum(dtype=torch.int64)[None]

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A r."""
        return -tokens.advantage * tokens.ratio


def sets_default_dtype(tokens: TokenBatch) -> Tensor:
    """Compute in float64, and leave it so."""
    torch.set_default_dtype(torch.float64)
    return -tokens.advantage * tokens.ratio


def turns_gradients_off(tokens: TokenBatch) -> Tensor:
    """Measure something without gradients, and leave it so."""
    loss_T = -tokens.advantage * tokens.ratio
    torch.set_grad_enabled(False)
    return loss_T


def makes_warnings_errors(tokens: TokenBatch) -> Tensor:
    """Debug with warnings as errors, and leave it so."""
    warnings.simplefilter("error")
    return -tokens.advantage * tokens.ratio


class OwnWarning(UserWarning):
    """One that nobody else gives."""


def makes_own_warnings_errors(tokens: TokenBatch) -> Tensor:
    """Make errors of warnings of one's own."""
    warnings.filterwarnings("error", category=OwnWarning)
    return -tokens.advantage * tokens.ratio


def exits(tokens: TokenBatch) -> Tensor:
    """Stop where nothing is to be learned."""
    sys.exit(0)


def forks(tokens: TokenBatch) -> Tensor:
    """Let a child go on as well."""
    FORKED.append(os.fork())
    return -tokens.advantage * tokens.ratio


def numpy_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Any:
    """Return an array."""
    return (rewards - rewards.mean()).numpy()


def bad_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return one number."""
    return rewards.mean()


def infinite_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Divide by a standard deviation that is 0."""
    return (rewards - rewards.mean()) / rewards.std()


NOT_CALLABLE = 3
FORKED: list[int] = []
