"""BAPO's search as an objective: statistics, decision, report and refusal."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.extension import BOUNDS_FIELDS
from tests.algorithm.batches import (
    clipped_tokens,
    gradient_of,
    make_objective,
    tokens_of,
)
from tests.fakes.given_tokens import make_tokens
from tests.oracles.token_batches import logprob_for_ratio


def test_bapo_bounds_come_from_the_statistics() -> None:
    config = AlgorithmConfig.model_validate(
        {
            "bapo": {
                "lower": {"start": 0.75, "max": 1.0, "step": 0.25},
                "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
                "target": 0.45,
            }
        }
    )
    objective = load_objective(config).objective
    assert objective.needs == "update"
    # P is 1 at c_high 1 and 1.25 at 1.25; N is 2 · 0.75.
    tokens = tokens_of([2.0, 0.5], [1.0, -2.0])
    decision = objective.decide(objective.statistics(tokens))
    assert objective.report_decision(decision.tolist()) == {
        "clip/low": 0.75,
        "clip/high": 1.25,
        "bapo/positive_share_start": pytest.approx(1 / 2.5),
        "bapo/positive_share": pytest.approx(1.25 / 2.75),
        "bapo/exit_start_share": 0.0,
        "bapo/exit_met_share": 1.0,
        "bapo/exit_exhausted_share": 0.0,
    }
    refused = objective.refuses(decision)
    assert refused is not None
    assert not bool(refused)
    bounds = objective.bounds(replace(tokens, decision=decision))
    assert bounds is not None
    assert [bound.item() for bound in bounds] == [0.75, 1.25]


@pytest.mark.parametrize(
    ("number", "shares"),
    [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1)), (4, (0, 0, 0))],
)
def test_the_exit_of_a_search_is_reported(number: int, shares: tuple[int, ...]) -> None:
    objective = make_objective()
    decision = [0.8, 1.2, 0.4, 0.5, number, 1, 2, 3]
    reported = objective.report_decision(decision)
    names = ("start", "met", "exhausted")
    assert tuple(reported[f"bapo/exit_{name}_share"] for name in names) == shares
    refused = objective.refuses(torch.tensor(decision, dtype=torch.float64))
    assert refused is not None
    assert bool(refused) == (number == 4)


@pytest.mark.parametrize(("bound", "advantage"), [("low", -1.0), ("high", 1.0)])
def test_a_searched_bound_clips_from_the_next_float_on(bound: str, advantage: float) -> None:
    """The search compares the same float32 numbers."""
    low, high = float(np.float32(0.6 + 7 * 0.02)), float(np.float32(1.2 + 3 * 0.05))
    limit = {"low": low, "high": high}[bound]
    objective = Bapo(BapoConfig(), None)
    logprob_T = torch.tensor([float(logprob_for_ratio(limit, step)) for step in range(-3, 4)])
    tokens = make_tokens(
        logprob_T,
        torch.zeros(7),
        torch.full((7,), advantage),
        decision=torch.tensor([low, high, 0, 0, 1, 0, 0, 7], dtype=torch.float64),
    )
    ratio_T = np.exp(logprob_T.double().numpy()).astype(np.float32)
    outside_T = ratio_T < limit if bound == "low" else ratio_T > limit
    assert 0 < outside_T.sum() < 7
    gradient = gradient_of(objective, tokens)
    assert (gradient.logprob_T == 0).tolist() == outside_T.tolist()
    assert clipped_tokens(objective, tokens) == {"high": 0, "low": 0, "dual": 0} | {
        bound: outside_T.sum()
    }


@pytest.mark.parametrize(
    ("advantage", "mask", "reason"),
    [(256.0, 1.0, "1 tokens have .* scale the rewards down"), (1.0, 0.5, "a mask other than 0")],
)
def test_tokens_beyond_the_exact_sums_are_refused_with_a_remedy(
    advantage: float, mask: float, reason: str
) -> None:
    objective = make_objective()
    zero_T = torch.zeros(2)
    tokens = make_tokens(zero_T, zero_T, torch.tensor([1.0, advantage]), torch.tensor([1.0, mask]))
    decision = objective.decide(objective.statistics(tokens))
    refused = objective.refuses(decision)
    assert refused is not None
    assert bool(refused)
    assert re.search(reason, objective.explain_refusal(decision.tolist()))


def test_a_side_of_the_search_has_at_most_256_candidates() -> None:
    def upper(num_steps: int) -> BapoConfig:
        side = {"start": 1.0, "max": 2.0, "step": 1 / num_steps}
        return BapoConfig.model_validate({"upper": side})

    assert upper(255).upper.step == 1 / 255
    with pytest.raises(ValueError, match=r"upper\.step .* 256 candidates, got 257"):
        upper(256)


def test_a_table_that_cannot_be_added_up_is_refused_with_a_remedy() -> None:
    objective = make_objective()
    decision = [2.0**31 if name == "tokens" else 0.0 for name in BOUNDS_FIELDS]
    assert re.search(r"2147483648 tokens.*smaller batches", objective.explain_refusal(decision))


def test_the_recipe_preset_searches_every_micro_batch_and_clips_twice() -> None:
    config = AlgorithmConfig.model_validate({"bapo": {"preset": "recipe"}})
    loaded = load_objective(config)
    assert isinstance(loaded.objective, Bapo)
    assert loaded.objective.needs == "micro_batch"
    assert loaded.objective.dual_clip == 3.0
    assert loaded.decision_size == 8
    search = loaded.objective.search
    no_tokens = torch.zeros(search.grid.num_slots, dtype=torch.int64)
    path = search.path(no_tokens).candidates
    assert len(path) == 21
    # The lower bound moves first; float32, rounded to 6e-8.
    assert (path[1].clip_low, path[1].clip_high) == pytest.approx((0.65, 1.2), abs=3e-7)
