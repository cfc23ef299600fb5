"""Intervals and p-values, by hand and by how often they are right in simulations."""

from __future__ import annotations

import numpy as np
import pytest

from bapo_megatron.evaluation.estimators import intervals, paired_difference

SAMPLES = 16
TRIALS = 400
RESAMPLES = 400


def scores_of(rng: np.random.Generator, num_problems: int) -> np.ndarray:
    """[P] avg@16 of problems of which each has its own chance of a right answer, mostly extreme."""
    return rng.binomial(SAMPLES, rng.beta(0.5, 0.5, num_problems)) / SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_problems", "low", "high"), [(5, 0.78, 0.92), (10, 0.88, 0.97), (30, 0.91, 0.98)]
)
def test_the_interval_covers_the_mean_over_all_problems_as_often_as_documented(
    num_problems, low, high
):
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(TRIALS):
        ends = intervals(scores_of(rng, num_problems)[:, None], RESAMPLES, seed=trial)
        covered += ends[0, 0] <= 0.5 <= ends[1, 0]
    # 95 % in the limit; too rarely with few problems. Monte Carlo error of 400 trials: ± 2.2 %.
    assert low <= covered / TRIALS <= high


def test_with_the_same_problems_every_time_it_covers_their_mean_always():
    rng = np.random.default_rng(1)
    chances = rng.beta(0.5, 0.5, 30)
    for trial in range(100):
        scores = rng.binomial(SAMPLES, chances) / SAMPLES
        ends = intervals(scores[:, None], RESAMPLES, seed=trial)
        assert ends[0, 0] <= chances.mean() <= ends[1, 0]


def test_without_a_difference_p_is_rarely_small():
    rng = np.random.default_rng(2)
    small = 0
    for trial in range(TRIALS):
        chances = rng.beta(0.5, 0.5, 30)
        first, second = (rng.binomial(SAMPLES, chances) / SAMPLES for _ in range(2))
        small += paired_difference(second - first, RESAMPLES, seed=trial).p_value < 0.05
    assert 0.02 <= small / TRIALS <= 0.10


def test_the_interval_is_that_of_all_resamples_where_they_can_be_listed():
    # Two problems, 0 and 1: the mean of a resample is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    ends = intervals(np.array([[0.0], [1.0]]), 4000, seed=0)
    assert ends[:, 0].tolist() == [0.0, 1.0]
    # Four problems of which one is right: binomial(4, 1/4) / 4. P(0) = 0.316; P(> 2/4) = 0.051 and
    # P(> 3/4) = 0.004, so that the 97.5th percentile is 3/4.
    ends = intervals(np.array([[1.0], [0], [0], [0]]), 20000, seed=0)
    assert ends[:, 0].tolist() == [0.0, 0.75]


def test_resamples_follow_from_the_seed_and_are_shared_by_all_columns():
    values = np.random.default_rng(3).random((40, 1))
    both = np.concatenate([values, 1 - values], axis=1)
    ends = intervals(both, 500, seed=7)
    assert np.array_equal(ends, intervals(both, 500, seed=7))
    assert not np.array_equal(ends, intervals(both, 500, seed=8))
    np.testing.assert_allclose(ends[:, 1], 1 - ends[::-1, 0], atol=1e-12)


def test_many_problems_are_resampled_in_parts_with_the_same_spread():
    values = np.tile([[0.0], [1.0]], (10_000, 1))  # 52 resamples at a time
    low, high = intervals(values, 400, seed=0)[:, 0]
    # ± 1.96 · 0.5 / √20000 = ± 0.0069.
    assert 0.4915 < low < 0.4945
    assert 0.5055 < high < 0.5085


def test_a_difference_in_every_problem_is_as_unlikely_as_the_resamples_can_tell():
    paired = paired_difference(np.full(30, 0.125), 999, seed=0)
    assert (paired.difference, paired.low, paired.high) == (0.125, 0.125, 0.125)
    assert paired.p_value == 0.002


def test_no_difference_has_the_p_value_one():
    assert paired_difference(np.zeros(30), 999, seed=0).p_value == 1.0
    # 1/3 − 1/3 in another order: sums of rounding errors are no difference.
    assert paired_difference(np.tile([1e-17, -2e-17], 15), 999, seed=0).p_value == 1.0


def test_one_problem_has_no_spread():
    assert intervals(np.array([[0.25]]), 100, seed=0)[:, 0].tolist() == [0.25, 0.25]
