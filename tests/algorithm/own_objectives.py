"""Objectives and advantages as a user would write them, outside the package (docs/extending.md).

Shape legend: T = tokens of a micro-batch or chunk.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.types import Sample


def cispo(tokens: TokenBatch, high: float = 1.2) -> Tensor:
    """CISPO: the clipped ratio weighs log-probs and has no gradient of its own."""
    weight = tokens.ratio.detach().clamp(max=high)
    return -tokens.advantage * weight * tokens.logprob


def towards_reference(tokens: TokenBatch) -> Tensor:
    """Half the square of ℓ − ℓ_ref, plus the teacher's mean over its likeliest tokens."""
    difference = tokens.logprob - tokens.columns["reference_logprob"]
    top = tokens.columns["teacher_top_logprobs"].mean(dim=1)
    counted = tokens.columns["teacher_top_ids"].ge(0).sum(dim=1)
    return difference.square() / 2 + tokens.ratio * (tokens.columns["teacher_logprob"] + top) / (
        1 + counted
    )


class Gspo(Objective):
    """GSPO: the ratio of a whole response, s = exp(mean x), clipped."""

    needs = "response"
    trains_zero_advantage = False

    def __init__(self, low: float = 3e-4, high: float = 4e-4) -> None:
        self.low, self.high = low, high

    def statistics(self, tokens: TokenBatch) -> Tensor:
        return tokens.logprob - tokens.behaviour_logprob

    def loss(self, tokens: TokenBatch) -> Tensor:
        assert tokens.response_sums is not None
        mean = tokens.response_sums / tokens.response_tokens.clamp(min=1)
        s = torch.exp(mean + tokens.logprob - tokens.logprob.detach())
        clipped = s.clamp(1 - self.low, 1 + self.high)
        return -torch.minimum(s * tokens.advantage, clipped * tokens.advantage)

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        assert tokens.response_sums is not None
        return {"gspo/log_ratio": tokens.response_sums / tokens.response_tokens.clamp(min=1)}


class HighEntropy(Objective):
    """80/20: only the tokens with the highest entropy train, by a histogram over the update."""

    needs = "update"
    selects_tokens = True
    bins, width = 64, 0.1

    def __init__(self, share: float = 0.2) -> None:
        self.share = share

    def _bin(self, entropy: Tensor) -> Tensor:
        return (entropy / self.width).to(torch.int64).clamp(max=self.bins - 1)

    def statistics(self, tokens: TokenBatch) -> Tensor:
        counts = torch.zeros(self.bins, dtype=torch.int64, device=tokens.mask.device)
        return counts.index_add_(0, self._bin(tokens.entropy), (tokens.mask > 0).to(torch.int64))

    def decide(self, total_K: Tensor) -> Tensor:
        above = total_K.flip(0).cumsum(0).flip(0)
        return (above > self.share * total_K.sum()).sum().to(torch.float64)[None]

    def select(self, tokens: TokenBatch) -> Tensor:
        assert tokens.decision is not None
        return self._bin(tokens.collected_entropy) >= tokens.decision[0]

    def loss(self, tokens: TokenBatch) -> Tensor:
        return plain(tokens)

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        return {"high_entropy/threshold": decision[0] * self.width}


class Anchor(Objective):
    """Pulls every token towards μ, whatever its advantage."""

    trains_zero_advantage = True

    def loss(self, tokens: TokenBatch) -> Tensor:
        return (tokens.logprob - tokens.behaviour_logprob).square()


class Bare:
    """A class that inherits nothing."""

    def loss(self, tokens: TokenBatch) -> Tensor:
        return plain(tokens)


def plain(tokens: TokenBatch) -> Tensor:
    """Policy gradient: −A r."""
    return -tokens.advantage * tokens.ratio


def rank_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Order of the rewards in the group, centred; shorter responses first where they tie."""
    lengths = torch.tensor([len(sample.response_token_ids) for sample in samples])
    order = (rewards - 1e-6 * lengths).argsort().argsort().double()
    return order - order.mean()


# What fails, at the start or later.


def whitens(tokens: TokenBatch) -> Tensor:
    """Mix tokens: the mean is that of whichever tokens come together."""
    return -(tokens.advantage - tokens.advantage.mean()) * tokens.ratio


def raises(tokens: TokenBatch) -> Tensor:
    """Fail."""
    weights = {"positive": 1.0}
    return plain(tokens) * weights["negative"]


def clamps_in_place(tokens: TokenBatch) -> Tensor:
    """Break the graph, which shows when it is differentiated."""
    return -tokens.advantage * tokens.ratio.clamp_(max=1.2)


class NoLoss:
    """Lack what makes an objective."""


def fails_late(tokens: TokenBatch) -> Tensor:
    """Pass the trial and fail in training, where groups have other rewards."""
    if tokens.update >= 1:
        raise RuntimeError("the second update is too much")
    return plain(tokens)


def exits(tokens: TokenBatch) -> Tensor:
    """Stop where nothing is to be learned."""
    sys.exit(0)


def numpy_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Any:
    """Return an array."""
    return (rewards - rewards.mean()).numpy()


def bad_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return one number."""
    return rewards.mean()


def call_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return the rewards of the calls."""
    return rewards.new_tensor(
        [r for sample in samples for s in sample.sequences for r in s.call_rewards]
    )


def sometimes_call_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Return those only in group 0."""
    return rewards if samples[0].group_id else call_advantage(rewards, samples)


def infinite_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Divide by a standard deviation that is 0."""
    return (rewards - rewards.mean()) / rewards.std()


NOT_CALLABLE = 3


FORKED: list[int] = []


def forks(tokens: TokenBatch) -> Tensor:
    """Let a child go on as well."""
    FORKED.append(os.fork())
    return -tokens.advantage * tokens.ratio
