"""Student's intervals and tests over seeds, against tables, scipy and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bapo_megatron.evaluation.estimators import (
    difference_over_seeds,
    holm,
    intervals,
    student_interval,
    student_p_value,
)


@pytest.mark.parametrize(
    ("num_seeds", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (11, 2.228)]
)
def test_the_interval_is_that_of_the_table_of_student_s_t(num_seeds: int, quantile: float) -> None:
    values = np.arange(num_seeds, dtype=float)
    low, high = student_interval(values)
    error = (num_seeds * (num_seeds + 1) / 12 / num_seeds) ** 0.5  # s² of 0 … n − 1: n(n + 1)/12
    assert (low + high) / 2 == pytest.approx((num_seeds - 1) / 2)
    assert (high - low) / 2 == pytest.approx(quantile * error, rel=2e-4)


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 5, 8, 9, 31, 60])
def test_intervals_and_p_values_are_those_of_scipy(num_seeds: int) -> None:
    rng = np.random.default_rng(num_seeds)
    for scale in (0.0, 0.3, 2.0):
        values = rng.normal(scale, 1.0, num_seeds)
        expected = stats.ttest_1samp(values, 0.0)
        assert student_p_value(values) == pytest.approx(expected.pvalue, abs=1e-12)
        for level in (0.5, 0.9, 0.95, 0.999):
            ends = tuple(expected.confidence_interval(level))
            assert student_interval(values, level) == pytest.approx(ends, rel=1e-9)


def test_seeds_that_differ_alike_have_no_spread() -> None:
    paired = difference_over_seeds(np.array([0.8, 0.7, 0.9]) - np.array([0.7, 0.6, 0.8]))
    assert paired.low == pytest.approx(paired.high)
    assert (paired.difference, paired.p_value) == (pytest.approx(0.1), 0.0)
    # 0.1 + 0.2 − 0.3 is a rounding error, and no difference.
    assert difference_over_seeds(np.array([0.1 + 0.2 - 0.3, 0.0])).p_value == 1.0


def test_with_three_seeds_student_s_interval_covers_the_mean_and_a_bootstrap_does_not() -> None:
    rng = np.random.default_rng(0)
    student = bootstrap = 0
    for trial in range(400):
        values = rng.normal(0.0, 1.0, 3)
        low, high = student_interval(values)
        student += low <= 0.0 <= high
        ends = intervals(values[:, None], 200, seed=trial)
        bootstrap += ends[0, 0] <= 0.0 <= ends[1, 0]
    # 95 % and 75 % (the mean is between the least and the greatest); Monte Carlo error ± 2.2 %.
    assert 0.92 <= student / 400 <= 0.98
    assert 0.65 <= bootstrap / 400 <= 0.80


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
