"""Estimates against enumeration of subsets; intervals and p-values by hand and by simulation."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bapo_megatron.evaluation.estimators import (
    NO_VOTE,
    candidates,
    difference_over_seeds,
    holm,
    intervals,
    majority_at_k,
    paired_difference,
    pass_at_k,
    student_interval,
)

SAMPLES = st.lists(st.tuples(st.integers(NO_VOTE, 3), st.booleans()), min_size=1, max_size=9)
"""Vote and rightness of each sample; right and wrong ones may share a cluster."""


def vote_by_hand(samples: tuple[tuple[int, bool], ...]) -> Fraction:
    """The probability that the vote of exactly these samples is right."""
    votes = [vote for vote, _ in samples if vote != NO_VOTE]
    if not votes:
        return Fraction(0)
    most = max(votes.count(vote) for vote in votes)
    winners = [vote for vote in set(votes) if votes.count(vote) == most]
    return Fraction(
        sum(
            Fraction(sum(right for v, right in samples if v == winner), most) for winner in winners
        ),
        len(winners),
    )


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right, data):
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    wanted = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(wanted, abs=1e-15)


def test_pass_at_k_by_hand():
    # 1 − C(3, 2) / C(4, 2) = 1 − 3/6.
    assert pass_at_k(4, 1, 2) == 0.5
    # 1 − (15·14·13·12) / (16·15·14·13), the case of AIME: 16 samples, one right, k = 4.
    assert pass_at_k(16, 1, 4) == 0.25


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(SAMPLES, st.data())
def test_maj_at_k_is_the_mean_vote_over_all_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    subsets = list(combinations(samples, k))
    wanted = sum(map(vote_by_hand, subsets), Fraction(0)) / len(subsets)
    votes, right = zip(*samples, strict=True)
    clusters = candidates(votes, [float(value) for value in right])
    assert majority_at_k(len(samples), clusters, k) == pytest.approx(float(wanted), abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "rewards", "k", "expected"),
    [
        # Votes: 7, 7, 12, none, of which 7 is right.
        ((0, 0, 1, NO_VOTE), (1, 1, 0, 0), 4, 1.0),
        ((0, 0, 1, NO_VOTE), (1, 1, 0, 0), 1, 0.5),
        # {7 7} {7 none} {7 none} right; {12 none} wrong; {7 12} {7 12} half: 4 of 6.
        ((0, 0, 1, NO_VOTE), (1, 1, 0, 0), 2, 4 / 6),
        ((0, 1, 2), (1, 0, 0), 3, 1 / 3),  # a tie is right as often as a tied answer is
        ((NO_VOTE,) * 3, (0, 0, 0), 2, 0.0),
        ((0,), (0.7 + 0.2 + 0.1,), 1, 1.0),  # below 1 by a rounding
        ((0,), (0.9,), 1, 0.0),
    ],
)
def test_maj_at_k_by_hand(votes, rewards, k, expected):
    actual = majority_at_k(len(votes), candidates(votes, rewards), k)
    assert actual == pytest.approx(expected, abs=1e-15)


@pytest.mark.slow
def test_large_numbers_of_samples_stay_probabilities():
    # All 1000 answers differ: every vote is a tie, right as often as a single sample.
    clusters = candidates(range(1000), [1.0] * 250 + [0.0] * 750)
    assert majority_at_k(1000, clusters, 500) == pytest.approx(0.25, rel=1e-9)
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5, rel=1e-12)


NUM_SAMPLES = 16
TRIALS = 400
NUM_RESAMPLES = 400


def scores_of(rng: np.random.Generator, num_problems: int) -> np.ndarray:
    """[P] avg@16 of problems of which each has its own chance of a right answer, mostly extreme."""
    return rng.binomial(NUM_SAMPLES, rng.beta(0.5, 0.5, num_problems)) / NUM_SAMPLES


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
        ends = intervals(scores_of(rng, num_problems)[:, None], NUM_RESAMPLES, seed=trial)
        covered += ends[0, 0] <= 0.5 <= ends[1, 0]
    # 95 % in the limit; too rarely with few problems. Monte Carlo error of 400 trials: ± 2.2 %.
    assert low <= covered / TRIALS <= high


def test_without_a_difference_p_is_rarely_small():
    rng = np.random.default_rng(2)
    small = 0
    for trial in range(TRIALS):
        chances = rng.beta(0.5, 0.5, 30)
        first, second = (rng.binomial(NUM_SAMPLES, chances) / NUM_SAMPLES for _ in range(2))
        small += paired_difference(second - first, NUM_RESAMPLES, seed=trial).p_value < 0.05
    assert 0.02 <= small / TRIALS <= 0.10


def test_the_interval_is_that_of_all_resamples_where_they_can_be_listed():
    # Two problems, 0 and 1: the mean of a resample is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    ends = intervals(np.array([[0.0], [1.0]]), 4000, seed=0)
    assert ends[:, 0].tolist() == [0.0, 1.0]
    # Four problems of which one is right: binomial(4, 1/4) / 4. P(0) = 0.316; P(> 2/4) = 0.051 and
    # P(> 3/4) = 0.004, so that the 97.5th percentile is 3/4.
    ends = intervals(np.array([[1.0], [0], [0], [0]]), 20000, seed=0)
    assert ends[:, 0].tolist() == [0.0, 0.75]
    assert intervals(np.array([[0.25]]), 100, seed=0)[:, 0].tolist() == [0.25, 0.25]


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


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 5, 8, 9, 31, 60])
def test_intervals_and_p_values_are_those_of_scipy(num_seeds: int) -> None:
    rng = np.random.default_rng(num_seeds)
    for scale in (0.0, 0.3, 2.0):
        values = rng.normal(scale, 1.0, num_seeds)
        expected = stats.ttest_1samp(values, 0.0)
        assert difference_over_seeds(values).p_value == pytest.approx(expected.pvalue, abs=1e-12)
        for level in (0.5, 0.9, 0.95, 0.999):
            ends = tuple(expected.confidence_interval(level))
            assert student_interval(values, level) == pytest.approx(ends, rel=1e-9)


def test_seeds_that_differ_alike_have_no_spread() -> None:
    paired = difference_over_seeds(np.array([0.8, 0.7, 0.9]) - np.array([0.7, 0.6, 0.8]))
    assert paired.low == pytest.approx(paired.high)
    assert (paired.difference, paired.p_value) == (pytest.approx(0.1), 0.0)
    # 0.1 + 0.2 − 0.3 is a rounding error, and no difference.
    assert difference_over_seeds(np.array([0.1 + 0.2 - 0.3, 0.0])).p_value == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
