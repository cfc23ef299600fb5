"""Thresholds from histograms against sorted tokens: M2PO and the share of highest entropy.

Shape legend: T = tokens.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.algorithm.objectives.histograms import BIN_WIDTH, HighEntropy
from tests.algorithm.batches import make_objective, random_batch
from tests.fakes.given_tokens import make_tokens


def tokens_of(x: Any, advantage: Any) -> TokenBatch:
    x_T = torch.as_tensor(x, dtype=torch.float64)
    advantage_T = torch.as_tensor(advantage, dtype=torch.float64)
    return make_tokens(x_T, torch.zeros_like(x_T), advantage_T)


def decided(objective: Objective, tokens: TokenBatch) -> list[float]:
    decision: list[float] = objective.decide(objective.statistics(tokens)).tolist()
    return decision


def sorted_threshold(x: np.ndarray, budget: float) -> float:
    """τ with mean(min(x², τ²)) = budget, where the mean of x² is above it."""
    square = np.sort(x**2)
    count, below = len(square), 0.0
    for number, value in enumerate(square):
        if below + value * (count - number) >= budget * count:
            return math.sqrt((budget * count - below) / (count - number))
        below += value
    raise AssertionError("the budget is not reached")


M2PO: dict[str, Any] = {"objective": "m2po", "m2po": {"max_low": 1.0, "min_high": 1.0}}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [0.01, 0.04, 0.08])
@pytest.mark.parametrize("num_tokens", [7, 400])
def test_the_threshold_of_m2po_is_within_a_bin_of_the_sorted_one(
    seed: int, budget: float, num_tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    x, advantage = 0.8 * rng.standard_t(3, num_tokens), rng.normal(size=num_tokens)
    outward = np.abs(x[x * advantage > 0])
    low, high, moment, is_bounded = decided(
        make_objective(objective="m2po", m2po={**M2PO["m2po"], "budget": budget}),
        tokens_of(x, advantage),
    )
    assert is_bounded == 1
    assert moment == pytest.approx(np.mean(outward**2), rel=1e-6)
    exact, threshold = sorted_threshold(outward, budget), math.log(high)
    assert -1e-6 <= exact - threshold < BIN_WIDTH
    assert math.log(low) == pytest.approx(-threshold, abs=1e-12)
    # The budget holds.
    assert np.mean(np.minimum(outward, threshold) ** 2) <= budget + 1e-6


def test_bounds_of_m2po_by_hand() -> None:
    # Outward: 1.5 and 0.5 (A > 0), −1 (A < 0). (0.25 + 2τ²)/3 = 0.5 at τ² = 0.625, τ = 0.79057:
    # the lower edge of its bin is 809/1024.
    x, advantage = [1.5, 0.5, -1.0, 3.0, -3.0], [1.0, 2.0, -1.0, -1.0, 1.0]
    objective = make_objective(objective="m2po", m2po={"budget": 0.5})
    low, high, moment, is_bounded = decided(objective, tokens_of(x, advantage))
    assert (low, high) == pytest.approx((math.exp(-809 / 1024), math.exp(809 / 1024)), rel=1e-12)
    assert (moment, is_bounded) == (pytest.approx(3.5 / 3, rel=1e-6), 1)
    assert objective.report_decision([low, high, moment, is_bounded]) == {
        "m2po/second_moment": moment,
        "m2po/bounded_share": 1,
        "clip/low": low,
        "clip/high": high,
    }


@pytest.mark.parametrize(
    ("x", "advantage", "low", "high", "moment"),
    [
        ([1.0], [1.0], 0.7, 1.5, 1.0),  # one token: τ = 0.2, so the narrowest bounds
        ([0.1], [1.0], 0.0, math.inf, 0.01),  # within the budget
        ([-1.0, 1.0], [1.0, -1.0], 0.0, math.inf, 0.0),  # none moves outwards
        ([], [], 0.0, math.inf, 0.0),
        ([1.0, 2.0], [0.0, 0.0], 0.0, math.inf, 0.0),
        ([0.0, 0.5, 0.5, -0.5], [1.0, 0.0, 1.0, 1.0], 0.7, 1.5, 0.25),  # one moves outwards
        ([25.0, -25.0], [1.0, -1.0], 0.7, 1.5, 400.0),  # beyond the clamp of ℓ − μ
    ],
)
def test_few_tokens_have_defined_bounds_in_m2po(
    x: list[float], advantage: list[float], low: float, high: float, moment: float
) -> None:
    objective = make_objective(objective="m2po")
    tokens = tokens_of(x, advantage)
    decision = decided(objective, tokens)
    assert decision[:2] == [low, high]
    assert decision[2] == pytest.approx(moment, abs=1e-6)
    assert ("clip/high" in objective.report_decision(decision)) == (high < math.inf)
    loss_T = objective.loss(replace(tokens, decision=torch.tensor(decision, dtype=torch.float64)))
    assert bool(torch.isfinite(loss_T).all())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_the_entropy_threshold_is_the_bin_of_the_sorted_one(seed: int, share: float) -> None:
    batch = random_batch(num_tokens=400, seed=seed)
    entropy_T = 4 * batch["entropy_T"].double() ** 3
    tokens = make_tokens(
        *(batch[name].double() for name in ("logprob_T", "behaviour_logprob_T", "advantage_T")),
        mask_T=batch["mask_T"].double(),
        entropy_T=entropy_T,
    )
    objective = make_objective(objective="none", entropy_share=share)
    first, kept_share = decided(objective, tokens)
    counted = np.sort(entropy_T[batch["mask_T"] > 0].numpy())[::-1]
    kth = counted[math.ceil(share * len(counted)) - 1]
    assert first * BIN_WIDTH <= kth < (first + 1) * BIN_WIDTH
    decision = torch.tensor([first, kept_share], dtype=torch.float64)
    selected_T = objective.select(replace(tokens, decision=decision)) & (tokens.mask > 0)
    assert selected_T.sum() == np.count_nonzero(counted >= first * BIN_WIDTH)
    assert kept_share == pytest.approx(selected_T.sum().item() / len(counted))
    assert share <= kept_share


def test_equal_entropies_are_all_kept_and_no_tokens_keep_none() -> None:
    objective = make_objective(objective="none", entropy_share=0.2)
    x_T = torch.zeros(5, dtype=torch.float64)
    equal = make_tokens(x_T, x_T, x_T + 1, entropy_T=x_T + 0.7)
    assert decided(objective, equal) == [716.0, 1.0]  # ⌊0.7 · 1024⌋
    masked = replace(equal, mask=x_T)
    assert decided(objective, masked)[1] == 0.0
    assert not isinstance(make_objective(objective="none", entropy_share=1.0), HighEntropy)


def test_entropies_by_hand() -> None:
    entropy_T = torch.tensor([0.1, 0.5, 20.0, 1.5, 0.0], dtype=torch.float64)
    tokens = make_tokens(entropy_T * 0, entropy_T * 0, entropy_T * 0 + 1, entropy_T=entropy_T)
    objective = make_objective(objective="none", entropy_share=0.4)
    decision = objective.decide(objective.statistics(tokens))
    selected_T = objective.select(replace(tokens, decision=decision))
    assert selected_T.tolist() == [False, False, True, True, False]
    reported = objective.report_decision(decision.tolist())
    assert reported == {"entropy_share/threshold": 1.5, "entropy_share/kept_share": 0.4}


def test_what_an_update_decides_follows_from_all_tokens() -> None:
    batch = random_batch(num_tokens=300)
    names = ("logprob_T", "behaviour_logprob_T", "advantage_T", "mask_T", "entropy_T")
    tokens = make_tokens(*(batch[name] for name in names))
    for algorithm in ({"objective": "bapo"}, {"objective": "m2po"}):
        alone, among = make_objective(**algorithm), make_objective(**algorithm, entropy_share=0.2)
        expected = alone.decide(alone.statistics(tokens))
        decision = among.decide(among.statistics(tokens))
        assert torch.equal(decision[2:], expected)
        known = replace(tokens, decision=decision)
        plain = replace(tokens, decision=expected)
        assert torch.equal(among.loss(known), alone.loss(plain))
        reported = among.report_decision(decision.tolist())
        assert reported.items() >= alone.report_decision(expected.tolist()).items()
        assert among.report(known).keys() == alone.report(plain).keys()
