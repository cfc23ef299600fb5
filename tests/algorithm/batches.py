"""Random tokens for tests of losses, and the bounds that clip them.

Shape legend: T = response tokens.
"""

from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import TokenGradient, differentiate
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.config.schema import AlgorithmConfig
from tests.fakes.given_tokens import make_tokens
from tests.oracles.bound_search import Tokens, exact_search
from tests.oracles.token_batches import paper_rule

LOW, HIGH, DUAL_CLIP = 0.75, 1.25, 3.0
CLIP = {"objective": "clip", "fixed": {"low": LOW, "high": HIGH}}


def make_objective(**algorithm: Any) -> Objective:
    """The objective of an ``algorithm`` section."""
    return load_objective(AlgorithmConfig.model_validate(algorithm)).objective


def random_batch(num_tokens: int = 200, seed: int = 0) -> dict[str, Tensor]:
    """More negative than positive advantages, so that a search has to move the bounds."""
    generator = torch.Generator().manual_seed(seed)
    behaviour_T = -torch.rand(num_tokens, generator=generator)
    return {
        "logprob_T": behaviour_T + 0.7 * torch.randn(num_tokens, generator=generator),
        "behaviour_logprob_T": behaviour_T,
        "advantage_T": torch.randn(num_tokens, generator=generator) - 0.2,
        "mask_T": (torch.rand(num_tokens, generator=generator) < 0.8).float(),
        "loss_weight_T": torch.full((num_tokens,), 1 / max(1, num_tokens)),
        "entropy_T": torch.rand(num_tokens, generator=generator),
    }


def with_gradient(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values in tensors of their own; log-prob and entropy require a gradient."""
    learnt = ("logprob_T", "entropy_T")
    return {name: t.clone().requires_grad_(name in learnt) for name, t in batch.items()}


def tokens_of(ratios: list[float], advantages: list[float]) -> TokenBatch:
    logprob_T = torch.tensor(ratios).log()
    return make_tokens(logprob_T, torch.zeros_like(logprob_T), torch.tensor(advantages))


def gradient_of(objective: Objective, tokens: TokenBatch) -> TokenGradient:
    """With weights 1."""
    return differentiate(objective, tokens, torch.ones(len(tokens)))


def clipped_tokens(objective: Objective, tokens: TokenBatch) -> dict[str, int]:
    return {
        name.removeprefix("clip/fraction_"): int(value_T.sum())
        for name, value_T in objective.report(tokens).items()
    }


def oracle_bounds(algorithm: str, batch: dict[str, Tensor]) -> tuple[float, float]:
    """The configured bounds, or those that exact arithmetic finds for the batch."""
    if algorithm == "clip":
        return LOW, HIGH
    names = ("logprob_T", "behaviour_logprob_T", "advantage_T", "mask_T")
    result = exact_search(Tokens(*(batch[name].numpy() for name in names)), paper_rule())
    assert result.exit == "met"
    assert result.clip_high > 1.25
    return result.clip_low, result.clip_high
