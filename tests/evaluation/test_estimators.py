"""avg@k, pass@k and maj@k against enumeration of all subsets."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.evaluation.estimators import (
    NO_VOTE,
    candidates,
    majority_at_k,
    pass_at_k,
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


def test_maj_at_k_by_hand():
    # Votes: 7, 7, 12, none, of which 7 is right.
    clusters = candidates([0, 0, 1, NO_VOTE], [1, 1, 0, 0])
    assert majority_at_k(4, clusters, 4) == 1.0
    assert majority_at_k(4, clusters, 1) == 0.5
    # {7 7} {7 none} {7 none} right; {12 none} wrong; {7 12} {7 12} half: 4 of 6.
    assert majority_at_k(4, clusters, 2) == pytest.approx(4 / 6, abs=1e-15)


def test_a_tie_is_right_as_often_as_a_tied_answer_is():
    assert majority_at_k(3, candidates([0, 1, 2], [1, 0, 0]), 3) == pytest.approx(1 / 3)


def test_without_any_answer_the_vote_is_wrong():
    assert majority_at_k(3, candidates([NO_VOTE] * 3, [0, 0, 0]), 2) == 0.0


def test_maj_at_1_is_the_share_of_right_samples_with_an_answer():
    clusters = candidates([0, 0, 1, 1, 1, NO_VOTE], [1, 1, 0, 0, 0, 0])
    assert majority_at_k(6, clusters, 1) == pytest.approx(2 / 6, abs=1e-15)


@pytest.mark.slow
def test_large_numbers_of_samples_stay_probabilities():
    # All 1000 answers differ: every vote is a tie, right as often as a single sample.
    clusters = candidates(range(1000), [1.0] * 250 + [0.0] * 750)
    assert majority_at_k(1000, clusters, 500) == pytest.approx(0.25, rel=1e-9)
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5, rel=1e-12)


def test_a_reward_of_weights_that_sum_to_one_is_right():
    assert candidates([0], [0.7 + 0.2 + 0.1])[0].num_right == 1
    assert candidates([0], [0.9])[0].num_right == 0
