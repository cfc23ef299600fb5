"""The clipped objectives against float64 autograd and at their limits.

Shape legend: T = response tokens.
"""

import math
from dataclasses import replace

import pytest
import torch

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import differentiate
from bapo_megatron.algorithm.objective import Objective
from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.algorithm.objectives.clip import FixedClip
from bapo_megatron.config.schema import AlgorithmConfig
from tests.algorithm.batches import (
    DUAL_CLIP,
    HIGH,
    LOW,
    clipped_tokens,
    gradient_of,
    oracle_bounds,
    random_batch,
    tokens_of,
    with_gradient,
)
from tests.fakes.given_tokens import make_tokens
from tests.oracles import policy_loss as oracle


@pytest.mark.parametrize("dual_clip", [None, DUAL_CLIP])
@pytest.mark.parametrize("searched", [False, True])
def test_an_objective_equals_float64_autograd(searched: bool, dual_clip: float | None) -> None:
    batch = random_batch()
    tokens = make_tokens(
        *(batch[name] for name in ("logprob_T", "behaviour_logprob_T", "advantage_T", "mask_T"))
    )
    objective: Objective = FixedClip(LOW, HIGH, dual_clip)
    low, high = oracle_bounds("bapo" if searched else "clip", batch)
    if searched:
        objective = Bapo(BapoConfig(), dual_clip)
        tokens = replace(tokens, decision=objective.decide(objective.statistics(tokens)))
    weight_T = batch["mask_T"] * batch["loss_weight_T"]
    computed = differentiate(objective, tokens, weight_T)
    exact = with_gradient(batch)
    del exact["entropy_T"]
    wanted = oracle.policy_loss(**exact, low=low, high=high, dual_clip=dual_clip)
    wanted.loss.backward()
    loss = (weight_T.double() * computed.loss_T.double()).sum()
    assert loss.item() == pytest.approx(wanted.loss.item(), abs=1e-6)
    torch.testing.assert_close(computed.logprob_T, exact["logprob_T"].grad, rtol=1e-6, atol=0)
    assert computed.entropy_T is None
    trained = tokens.select(torch.nonzero(batch["mask_T"]).squeeze(1))
    assert clipped_tokens(objective, trained) == {
        "high": wanted.clipped_high,
        "low": wanted.clipped_low,
        "dual": wanted.clipped_dual,
    }
    assert not any(t.requires_grad for t in (computed.ratio_T, computed.loss_T, computed.logprob_T))


def test_at_a_ratio_equal_to_the_dual_clip_the_gradient_passes() -> None:
    """Other limits: test_bapo.py."""
    objective, tokens = FixedClip(0.5, 1.5, 2.0), tokens_of([2.0], [-1.0])
    assert gradient_of(objective, tokens).logprob_T.tolist() == pytest.approx([2.0], rel=1e-6)
    assert clipped_tokens(objective, tokens) == {"high": 0, "low": 0, "dual": 0}


@pytest.mark.parametrize(
    ("algorithm", "low", "high", "reported"),
    [
        (
            {"objective": "clip", "fixed": {"low": 0.8, "high": 1.28}},
            0.8,
            1.28,
            {"clip/low": 0.8, "clip/high": 1.28},
        ),
        ({"objective": "none"}, 0.0, math.inf, {}),
    ],
)
def test_a_constant_clip_searches_nothing(
    algorithm: dict[str, object], low: float, high: float, reported: dict[str, float]
) -> None:
    loaded = load_objective(AlgorithmConfig.model_validate(algorithm))
    assert loaded.objective.needs == "token"
    assert (loaded.statistic_size, loaded.decision_size) == (0, 0)
    tokens = tokens_of([1e8, 1e-8], [1.0, -1.0])
    clipped = {"high": 1, "low": 1, "dual": 0} if reported else {"high": 0, "low": 0, "dual": 0}
    assert clipped_tokens(loaded.objective, tokens) == clipped
    bounds = loaded.objective.bounds(tokens)
    assert bounds is not None
    assert [bound.item() for bound in bounds] == pytest.approx([low, high], rel=1e-7)
    assert loaded.objective.report_decision(()) == reported
    assert loaded.objective.refuses(torch.zeros(0)) is None
