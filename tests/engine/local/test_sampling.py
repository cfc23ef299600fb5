"""Tokens are drawn from exactly the distribution whose log-probs are reported."""

import math

import numpy as np
import pytest
import torch

from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.engine.local.decoder import Filters, sample, uniform_numbers

CPU = torch.device("cpu")
PROBABILITIES = (0.4, 0.0, 0.3, 0.15, 0.1, 0.05)
LOGITS = torch.tensor([math.log(p) if p else -math.inf for p in PROBABILITIES])
NUM_DRAWS = 20000
CHI_SQUARE_LIMITS = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5}
"""By degrees of freedom; exceeded once in 1000 seeds, and the seed is fixed."""


def _draw(settings: SamplingSettings, *others: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of NUM_DRAWS rows; other settings only share the step."""
    uniform = torch.from_numpy(np.random.default_rng(3).random(NUM_DRAWS))
    rows = [settings] * NUM_DRAWS + list(others)
    uniform_B1 = torch.cat((uniform, torch.full((len(others),), 0.5, dtype=torch.float64)))[:, None]
    filters = Filters.of_rows(rows, len(rows), CPU)
    tokens_B1, logprobs_BV = sample(LOGITS.expand(len(rows), -1), uniform_B1, filters)
    logprobs_B1 = logprobs_BV.gather(1, tokens_B1)
    return tokens_B1[:NUM_DRAWS, 0].numpy(), logprobs_B1[:NUM_DRAWS, 0].numpy()


def _assert_drawn_from(tokens: np.ndarray, probabilities: list[float]) -> None:
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = np.array(probabilities) * NUM_DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < CHI_SQUARE_LIMITS[int(possible.sum()) - 1]


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, -1, PROBABILITIES),
        (1.0, 2, [4 / 7, 0, 3 / 7, 0, 0, 0]),
        (0.75, -1, [0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (0.35, -1, [1, 0, 0, 0, 0, 0]),
        (0.96, 4, [0.4 / 0.95, 0, 0.3 / 0.95, 0.15 / 0.95, 0.1 / 0.95, 0]),
        (0.8, 3, [4 / 7, 0, 3 / 7, 0, 0, 0]),  # 0.7 of the 0.85 of three
        (0.57, 2, [1, 0, 0, 0, 0, 0]),  # 4 / 7 of the two
    ],
)
def test_tokens_follow_the_distribution_and_filters_leave_out_tokens_but_not_log_probs(
    top_p: float, top_k: int, expected: list[float]
) -> None:
    tokens, logprobs = _draw(SamplingSettings(1.0, 1, top_p=top_p, top_k=top_k, seed=0))
    if max(expected) == 1:
        assert set(tokens.tolist()) == {0}
    else:
        _assert_drawn_from(tokens, expected)
    np.testing.assert_allclose(logprobs, np.log(np.array(PROBABILITIES)[tokens]), atol=1e-6)


def test_a_temperature_of_one_half_squares_the_odds() -> None:
    tokens, logprobs = _draw(SamplingSettings(0.5, 1, seed=0))
    # 0.16, 0.09, 0.0225, 0.01 and 0.0025 over their sum 0.285
    expected = [0.5614035, 0.0, 0.3157895, 0.0789474, 0.0350877, 0.0087719]
    _assert_drawn_from(tokens, expected)
    np.testing.assert_allclose(np.exp(logprobs), np.array(expected)[tokens], atol=1e-6)


def test_filters_of_another_row_change_nothing() -> None:
    alone, _ = _draw(SamplingSettings(1.0, 1, seed=0))
    beside, _ = _draw(
        SamplingSettings(1.0, 1, seed=0), SamplingSettings(1.0, 1, top_p=0.5, top_k=2, seed=0)
    )
    np.testing.assert_array_equal(alone, beside)


def test_at_temperature_0_the_likeliest_token_is_taken_with_its_log_prob_at_1() -> None:
    tokens, logprobs = _draw(SamplingSettings(0.0, 1, seed=0), SamplingSettings(1.0, 1, seed=0))
    assert set(tokens.tolist()) == {0}
    np.testing.assert_allclose(logprobs, math.log(0.4), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_uniform_number_draws_an_impossible_token(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    filters = Filters.of_rows([SamplingSettings(1.0, 1, seed=0)], 1, CPU)
    tokens, _ = sample(logits, torch.tensor([[uniform]], dtype=torch.float64), filters)
    assert tokens.item() == (1 if uniform == 0 else 3)


def test_a_uniform_number_depends_on_seed_and_position_only() -> None:
    whole = uniform_numbers(11, 0, 256)
    assert whole[:2].tolist() == [0.12701753267435878, 0.6846286134593053]
    for position in (1, 2, 3, 4, 63, 64, 65, 200):
        np.testing.assert_array_equal(uniform_numbers(11, position, 50), whole[position:][:50])
    assert len(np.unique(whole)) == 256
    assert not np.isin(uniform_numbers(12, 0, 256), whole).any()
