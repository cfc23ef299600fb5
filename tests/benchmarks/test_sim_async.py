"""The asynchronous configurations hide their training, by simulation."""

from __future__ import annotations

import pytest

from tests.benchmarks.sim_async import SEVEN, THIRTY_TWO, Case, simulate


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("bp-math-7b-64k-async", SEVEN, 32, 32),
        Case("bp-math-32b-64k-async", THIRTY_TWO, 128, 128),
    ],
    ids=lambda case: case.config,
)
def test_a_step_takes_little_more_than_its_rollout_at_the_paper_s_staleness(case: Case) -> None:
    asynchronous = simulate(case, steps=8, warm_up=8, seed=0)
    assert asynchronous.rollout_s > asynchronous.training_s
    assert asynchronous.ratio <= 1.05
    assert asynchronous.age_max <= 7  # 8 updates per batch
    assert asynchronous.over_7_share == 0


@pytest.mark.slow
def test_a_synchronous_step_is_the_sum_and_its_partial_rollouts_are_two_updates_older() -> None:
    case = Case("bp-math-32b-64k", THIRTY_TWO, 1024, 1024)
    outcome = simulate(case, steps=2, warm_up=2, seed=0)
    assert outcome.step_s == pytest.approx(outcome.rollout_s + outcome.training_s + 5.0)
    assert outcome.ratio > 1
    assert outcome.age_max == 3  # a step of two updates, and one within the batch
